"""Two ranks enter a module together, although the vote of one is late and the other's call runs into its timeout.

``meet``: although one comes after the other's call has run into its timeout; it can be paused while it waits.
``adapters``: with the newest version of an adapter that both have, while one gets versions earlier than the other.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

import weightsync
from weightsync.engines.in_step import InStep
from weightsync.errors import DeadlineExceeded, VersionError
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig

SECONDS = 30.0


def main(rank: int, store: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    {"meet": meet, "adapters": adapters, "vote": vote}[kind](rank)
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

    def casting(ranks: InStep, *asked: Any) -> tuple[bool, bool]:
        try:
            return cast(ranks, *asked)
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


def adapters(rank: int) -> None:
    layer, used = torch.nn.Linear(2, 2), list[int | str | None]()
    module = torch.nn.Sequential(layer)
    adapter = weightsync.ModuleAdapter(module, process_group=dist.group.WORLD, adapter_slots=8)
    loras = adapter.lora_versions
    assert loras is not None

    def show(number: int) -> None:
        matrices = {f"base_model.model.0.lora_{part}.weight": torch.full((2, 2), float(number)) for part in "AB"}
        loras.stage(f"alice/math@{number}", AdapterSpec("alice/math", LoraConfig(2, 2.0)), matrices)
        loras.register(Version("alice/math", number, "", ""))

    def use(name: str | None = "alice/math") -> None:
        try:
            with adapter.in_use(SECONDS, adapter=name) as version:
                dist.barrier()  # hangs unless both are inside
                number = None if version is None else version.number
                added = module(torch.ones(1, 2)) - torch.nn.functional.linear(torch.ones(1, 2), layer.weight, layer.bias)
                assert torch.allclose(added, torch.full((1, 2), 4.0 * (number or 0) ** 2), atol=1e-4)
                used.append(number)
        except VersionError as error:
            used.append(str(error))

    use()
    show(1)
    if rank == 0:
        show(2)
    use()
    use("alice/math@2")
    if rank == 1:
        show(2)
    use()
    if rank == 0:
        loras.drop("alice/math@1")
    use("alice/math@1")
    use()
    use("alice/math" if rank else "alice/math@2")
    use(None if rank else "alice/math")
    use(None)
    adapter.pause("abort", SECONDS)
    print(json.dumps({"used": used, "users": len(adapter._users), "loras": sorted(loras.labels())}), flush=True)


def vote(rank: int) -> None:
    told, cast = threading.Event(), InStep.vote

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    def late(ranks: InStep, *asked: Any) -> tuple[bool, bool]:
        told.wait(SECONDS)
        return cast(ranks, *asked)

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
