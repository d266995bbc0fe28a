"""Actors of the Ray tests: workers that know nothing of weightsync, and what the tests ask them beyond that."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync.config import ClientSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.model import Manifest, PauseMode
from weightsync.server.client import Client
from weightsync.tensors.shards import Shard, manifest_of, shard

ROWS, COLUMNS = 2048, 1024
MODEL_BYTES = 4 * ROWS * (COLUMNS + 1)
TIMEOUT = 90.0


def model(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(COLUMNS, ROWS)


def change(module: torch.nn.Module, number: int) -> None:
    """One step of training, the same for every sharding."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + number / 8).add_(number)


def mark(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for tensor in tensors]


class Trainer:
    """One rank of an FSDP2 trainer."""

    def __init__(self, rank: int, world_size: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        self.model = model(5)
        fully_shard(self.model)

    def step(self, number: int) -> None:
        if any(not isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise TypeError("the model is not sharded")
        change(self.model, number)

    def pid(self) -> int:
        return os.getpid()


class Stalling(ModuleAdapter):
    """Stops where a round has paused it, if told to."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.stall, self.paused = False, threading.Event()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        super().pause(mode, timeout)
        if self.stall:
            self.paused.set()
            threading.Event().wait(TIMEOUT)


class Half(ModuleAdapter):
    """Rows from ``first`` on, as one of two tensor-parallel ranks holds them."""

    def __init__(self, module: torch.nn.Module, first: int) -> None:
        super().__init__(module)
        self.first = first

    def manifest(self) -> Manifest:
        return manifest_of(model(0))

    def shards(self) -> Sequence[Shard]:
        weight, bias = self.module.get_parameter("weight"), self.module.get_parameter("bias")
        return [
            shard("bias", bias, (ROWS,), (self.first,)),
            shard("weight", weight, (ROWS, COLUMNS), (self.first, 0)),
        ]


class Engine:
    """One rank of a serving engine: the whole model, or ``rank``'s half of it."""

    def __init__(self, rank: int | None = None) -> None:
        torch.set_num_threads(1)
        if rank is None:
            self.model = model(99)
            self.adapter: ModuleAdapter = Stalling(self.model)
        else:
            self.model = torch.nn.Linear(COLUMNS, ROWS // 2)
            self.adapter = Half(self.model, rank * ROWS // 2)

    def mark(self) -> tuple[str | None, list[str]]:
        """The version that is served, and what is there."""
        # No round runs meanwhile, and the halves have no process group by which they could enter in step.
        version = self.adapter.version
        return None if version is None else str(version), mark([self.model.weight, self.model.bias])

    def stall(self) -> None:
        assert isinstance(self.adapter, Stalling)
        self.adapter.stall = True

    def stalled(self) -> bool:
        assert isinstance(self.adapter, Stalling)
        return self.adapter.paused.wait(TIMEOUT)

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def pid(self) -> int:
        return os.getpid()


class Group:
    """A worker group as frameworks have them."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers


def count_what_ray_carries(_worker: object) -> None:
    """From now on this process writes down the size of everything that it gives Ray to carry."""
    from ray._private.serialization import SerializationContext

    if hasattr(SerializationContext, "sizes"):
        return
    original = SerializationContext.serialize
    sizes: list[int] = []

    def counted(self: Any, value: object) -> Any:
        made = original(self, value)
        sizes.append(made.total_bytes)
        return made

    SerializationContext.sizes = sizes
    SerializationContext.serialize = counted


def what_ray_carried(_worker: object) -> list[int]:
    from ray._private.serialization import SerializationContext

    sizes = list(SerializationContext.sizes)
    SerializationContext.sizes.clear()
    return sizes


class Alone:
    """A process that finds the coordinator by its environment."""

    def status(self) -> str:
        """The run, as the coordinator says to a holder of its token."""
        with Client(ClientSettings.load()) as client:
            return client.status().run
