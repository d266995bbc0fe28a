"""One rank of ``test_packed_broadcast.py``: ``packed_broadcast_rank.py RANK PORT HOW``. Says what it saw as one JSON line."""

from __future__ import annotations

import faulthandler
import json
import sys
import time

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.transports.broadcast.nccl import PackedBroadcast, broadcast_frames
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group
from weightsync.transports.net.frames import cut_tiles

BUFFER = 2 << 20
SIZES = [1, 3, 511, 512, 513, 0, 4 << 20, 100_000, 77, (5 << 20) + 9, *([40_961] * 300)]
"""Bytes of the tensors: odd ones, none, some larger than a buffer, and many."""


def weights(version: int, device: torch.device) -> list[torch.Tensor]:
    """What rank 0 holds at a version."""
    generator = torch.Generator().manual_seed(version)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device) for size in SIZES]


def main() -> None:
    """Play one rank."""
    faulthandler.dump_traceback_later(60, exit=True)
    rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    deadline = Deadline(50)
    rendezvous = StoreRendezvous("127.0.0.1", 2, deadline, port) if rank == 0 else None
    group = init_custom_process_group(
        "nccl", rank, 2, "weights", deadline, address="127.0.0.1", port=port, rendezvous=rendezvous, device=device, priority=True
    )
    mine = [torch.zeros(size, dtype=torch.uint8, device=device) for size in SIZES]
    where, sizes = np.array([one.data_ptr() for one in mine if len(one)]), np.array([size for size in SIZES if size])
    one = np.ones(len(sizes), np.int64)
    tiles = cut_tiles(CopyTable(one.astype(np.int32) - 1, where, sizes, where, sizes, one, sizes), TILE_BYTES)
    frames = broadcast_frames(np.array([len(tiles)]), tiles.row_bytes, BUFFER)
    programs = {} if how == "few" else {"programs": 0}
    broadcast = PackedBroadcast(tiles, frames, device, BUFFER, 3, [0] if rank == 0 else None, **programs)
    found: dict[str, object] = {"buffer_bytes": broadcast.buffer_bytes, "nbytes": broadcast.nbytes, "equal": []}
    equal: list[bool] = []
    for version in (1, 2, 3):
        expected = weights(version, device)
        if rank == 0:
            torch._foreach_copy_(mine, expected)  # in the caller's stream, which the broadcast has to wait for
        broadcast.run(group, version, deadline)
        equal.append(all(map(torch.equal, mine, expected)))
    found["equal"] = equal
    if how == "late" and rank == 1:  # nobody sends a fourth time
        started = time.monotonic()
        try:
            broadcast.run(group, 4, Deadline(3))
        except WeightSyncError as error:
            found |= {"error": type(error).__name__, "seconds": time.monotonic() - started, "closed": group.closed}
    elif how == "late":
        sys.stdin.read()  # stay, and do nothing
    group.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
