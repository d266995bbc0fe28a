"""One rank of ``test_groups.py``: ``nccl_group_rank.py RANK PORT HOW``. Says what it saw as one JSON line."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group

SHAPE, SEED = (1000, 777), 3


def expected(device: torch.device) -> torch.Tensor:
    """What rank 0 sends."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED)).bfloat16().to(device)


def as_the_engines_do(port: int, device: torch.device) -> bool:
    """Join with the recipe that LMDeploy and SGLang share, and receive a typed tensor."""
    private: Any = c10d
    timeout = timedelta(seconds=60)
    store, rank, world = next(iter(private.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = private._new_process_group_helper(
        world, rank, [], "nccl", private.PrefixStore("weights", store), group_name="weights", backend_options=None, timeout=timeout
    )
    private._world.pg_group_ranks[group] = {i: i for i in range(world)}
    got = torch.empty(SHAPE, dtype=torch.bfloat16, device=device)
    dist.broadcast(got, src=0, group=group)
    torch.cuda.synchronize()
    return torch.equal(got, expected(device))


def main() -> None:
    """Play one rank."""
    faulthandler.dump_traceback_later(45, exit=True)
    rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    deadline = Deadline(60)
    if rank == 1 and how == "recipe":
        print(json.dumps({"equal": as_the_engines_do(port, device)}), flush=True)
        return
    rendezvous = StoreRendezvous("127.0.0.1", 2, deadline, port) if rank == 0 else None
    group = init_custom_process_group(
        "nccl", rank, 2, "weights", deadline, address="127.0.0.1", port=port, rendezvous=rendezvous, device=device
    )
    mine = expected(device) if rank == 0 else torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    group.broadcast([mine], deadline)
    found: dict[str, object] = {"equal": torch.equal(mine, expected(device))}
    if how == "late" and rank == 1:  # nobody sends a second time
        started = time.monotonic()
        try:
            group.broadcast([mine], Deadline(3))
        except WeightSyncError as error:
            found |= {"error": type(error).__name__, "seconds": time.monotonic() - started, "closed": group.closed}
    elif how == "late":
        sys.stdin.read()  # stay, and do nothing
    group.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
