"""A bare :class:`torch.nn.Module` as a rollout engine: the smallest complete adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.errors import DeadlineExceeded, LoadError
from weightsync.messages import PauseMode
from weightsync.model import Manifest, Version
from weightsync.roles.adapter import EngineAdapter
from weightsync.tensors.shards import Shard, shards_of

__all__ = ["ModuleAdapter"]


class ModuleAdapter(EngineAdapter):
    """Parameters of ``module`` (plain or DTensor) are written in place, between two uses of it.

    Whoever runs the module does so ``with adapter.in_use() as version:``; a round waits for that and holds it off meanwhile.
    """

    name = "module"

    def __init__(self, module: torch.nn.Module, *, buffers: bool = False) -> None:
        self.module = module
        self.version: Version | None = None
        self._buffers = buffers
        self._weights = threading.Lock()
        self._paused = False

    @contextmanager
    def in_use(self, timeout: float = 60.0) -> Iterator[Version | None]:
        """Keep rounds away from the module, and say which version it holds (``None`` before the first).

        Raises :class:`~weightsync.errors.DeadlineExceeded` if the module stays paused or used for ``timeout`` seconds.
        """
        if not self._weights.acquire(timeout=timeout):
            raise DeadlineExceeded(f"the module was paused for an update, or in use, for more than {timeout:g} s")
        try:
            yield self.version
        finally:
            self._weights.release()

    def manifest(self) -> Manifest:
        """The module's own parameters (and persistent buffers, if asked for)."""
        return shards_of(self.module, buffers=self._buffers)[0]

    def shards(self) -> Sequence[Shard]:
        """The parameters themselves: direct delivery."""
        return shards_of(self.module, buffers=self._buffers)[1]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Wait until nobody uses the module; all modes mean the same here."""
        if self._paused:
            return
        if not self._weights.acquire(timeout=timeout):
            raise DeadlineExceeded(f"the module was in use for more than {timeout:g} s (in_use() never ended)")
        self._paused = True
        self.version = None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors into the parameters of the same names."""
        own = {shard.name: shard for shard in self.shards()}
        for name, tensor in tensors:
            if not tensor.numel():
                continue
            if name not in own:
                raise LoadError(f"the module has no parameter named {name!r}")
            shard = own[name]
            region = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
            shard.tensor.copy_(tensor[region])

    def finish(self, version: Version) -> None:
        """Take the version's label."""
        self.version = version

    def resume(self) -> None:
        """Let the module be used again."""
        if self._paused:
            self._paused = False
            self._weights.release()
