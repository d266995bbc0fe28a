"""Two ranks enter a module together, although the vote of one is late and the other's call runs into its timeout."""

from __future__ import annotations

import json
import sys
import threading

import torch
import torch.distributed as dist

import weightsync
from weightsync.deadline import Deadline
from weightsync.engines.in_step import InStep
from weightsync.errors import DeadlineExceeded

SECONDS = 30.0


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    told, vote = threading.Event(), InStep.vote

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    def late(ranks: InStep, free: bool, deadline: Deadline) -> bool:
        told.wait(SECONDS)
        return vote(ranks, free, deadline)

    adapter = weightsync.ModuleAdapter(torch.nn.Linear(2, 2), process_group=dist.group.WORLD)
    with adapter.in_use(SECONDS):  # makes the group, which takes a while
        pass
    outcome, paused = "", None
    if rank == 1:
        setattr(InStep, "vote", late)  # noqa: B010 - for this process
        threading.Thread(target=listen, daemon=True).start()
    else:
        try:
            with adapter.in_use(2.0):
                outcome = "entered alone"
        except DeadlineExceeded as error:
            outcome = str(error)
        try:
            adapter.pause("abort", 0.2)
        except DeadlineExceeded:
            paused = False  # the other rank may have the answer already, and be inside
        print("late", flush=True)
    with adapter.in_use(SECONDS):
        dist.barrier()  # hangs unless both are inside
    adapter.pause("abort", SECONDS)
    print(json.dumps({"outcome": outcome, "paused": paused, "users": len(adapter._users)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
