"""Trainer ranks and receivers of tests of streams, and what they send."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from weightsync.engine.receiver import Receiver
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

__all__ = ["SECONDS", "SMALL", "WINDOW", "Tensors", "World", "lent", "received", "same", "weights"]

Tensors = dict[str, torch.Tensor]

SECONDS = 30.0
WINDOW = 4096
SMALL = Stream(window_bytes=WINDOW)


def weights(seed: int) -> Tensors:
    """Many windows: mixed dtypes, a scalar, an empty tensor, tensors of several windows, and one with an awkward last dimension."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {"lm_head": torch.randn(37, 24, generator=generator)}
    for layer in range(12):
        tensors[f"layers.{layer}.up"] = torch.randn(24, 31, generator=generator).bfloat16()
        tensors[f"layers.{layer}.norm"] = torch.randn(31, generator=generator)
    tensors["embed"] = torch.randn(130, 41, generator=generator).bfloat16()
    tensors["scale"] = torch.tensor(0.5)
    tensors["nothing"] = torch.zeros(0, 7)
    tensors["deep"] = torch.randn(3, 5, 7, 29, generator=generator)
    tensors["long"] = torch.arange(9000, dtype=torch.int64)
    return tensors


def lent(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """A generator like a framework's: what it yielded is gone when the next one is asked for."""
    for name, tensor in tensors.items():
        memory = tensor.clone()
        yield name, memory
        memory.fill_(7)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def received(receiver: Receiver, timeout: float = SECONDS) -> Tensors:
    tensors: Tensors = {}
    for batch in receiver.receive(timeout):
        for name, tensor in batch:
            assert name not in tensors
            tensors[name] = tensor.clone()
    return tensors


class World:
    """Trainer ranks, receivers and threads of one test."""

    def __init__(self, server: BackgroundServer, owned: ExitStack) -> None:
        self.server, self._owned = server, owned
        self.pool = owned.enter_context(ThreadPoolExecutor(8))

    def trainer(self, stream: Any = SMALL, rank: int = 0, world_size: int = 1, **options: Any) -> Trainer:
        trainer = Trainer(stream, self.server.url, token=self.server.token, rank=rank, world_size=world_size, **options)
        return self._owned.enter_context(trainer)

    def receiver(self, name: str = "r0", **options: Any) -> Receiver:
        return self._owned.enter_context(Receiver(name, self.server.url, token=self.server.token, **options))

    def receive(self, receiver: Receiver) -> Future[Tensors]:
        """Begin a loop. It has begun when this returns: only the first one hears of publications that failed before it."""
        handover = receiver._handover
        before = handover._takers
        coming = self.pool.submit(received, receiver)
        with handover._changed:
            assert handover._changed.wait_for(lambda: handover._takers > before, SECONDS)
        return coming
