"""Two ranks enter a module together, although the vote of one is late and the other's call runs into its timeout.

``meet``: although one comes after the other's call has run into its timeout; it can be paused while it waits.
"""

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


def main(rank: int, store: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    (meet if kind == "meet" else vote)(rank)
    dist.barrier()
    dist.destroy_process_group()


def meet(rank: int) -> None:
    adapter = weightsync.ModuleAdapter(torch.nn.Linear(2, 2), process_group=dist.group.WORLD)
    with adapter.in_use(SECONDS):  # makes the group, which takes a while
        pass
    voted, cast = threading.Event(), InStep.vote

    def use() -> None:
        with adapter.in_use(SECONDS):
            dist.barrier()  # hangs unless both are inside

    def casting(ranks: InStep, free: bool, deadline: Deadline) -> bool:
        try:
            return cast(ranks, free, deadline)
        finally:
            voted.set()

    if rank == 0:
        try:
            with adapter.in_use(1.0):
                pass
        except DeadlineExceeded:
            print("gave up", flush=True)
        sys.stdin.readline()
        use()
    else:
        sys.stdin.readline()
        setattr(InStep, "vote", casting)  # noqa: B010 - for this process
        thread = threading.Thread(target=use)
        thread.start()
        voted.wait(5.0)
        try:
            adapter.pause("abort", 5.0)
        except DeadlineExceeded as error:
            print(error, flush=True)
        else:
            print("paused", flush=True)
        adapter.resume()
        thread.join(SECONDS)


def vote(rank: int) -> None:
    told, cast = threading.Event(), InStep.vote

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    def late(ranks: InStep, free: bool, deadline: Deadline) -> bool:
        told.wait(SECONDS)
        return cast(ranks, free, deadline)

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


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
