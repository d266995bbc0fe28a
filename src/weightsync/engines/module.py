"""A bare :class:`torch.nn.Module` as a rollout engine: the smallest complete adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import DeadlineExceeded
from weightsync.model import Manifest, PauseMode, Version
from weightsync.tensors.shard_loader import ShardLoader
from weightsync.tensors.shards import FollowedShards, Shard

__all__ = ["ModuleAdapter"]


class ModuleAdapter(EngineAdapter):
    """Parameters of ``module`` (plain or DTensor) are written in place, between two uses of it.

    Whoever runs the module does so ``with adapter.in_use() as version:``; a round waits for that and holds it off meanwhile.
    """

    name = "module"
    pauses_twice = True

    def __init__(self, module: torch.nn.Module, *, include_buffers: bool = False) -> None:
        self.module = module
        self.version: Version | None = None
        self._followed = FollowedShards(module, include_buffers=include_buffers)
        self._changed = threading.Condition()
        self._paused = False
        self._users = 0
        self._loader: ShardLoader | None = None
        self._loader_of: Sequence[Shard] = ()
        self._moved = True  # perhaps: looked at by the first load after a pause, once for all buckets

    @contextmanager
    def in_use(self, timeout: float = 60.0) -> Iterator[Version | None]:
        """Keep rounds away from the module, and say which version it holds (``None`` before the first).

        One user at a time. Raises :class:`~weightsync.errors.DeadlineExceeded` if the module stays paused or used for ``timeout``
        seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._paused and not self._users, timeout):
                raise DeadlineExceeded(f"the module was paused for an update, or in use, for more than {timeout:g} s")
            self._users += 1
        try:
            yield self.version
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def manifest(self) -> Manifest:
        """The module's own parameters (and persistent buffers, if asked for)."""
        return self._followed.now()[0]

    def shards(self) -> Sequence[Shard]:
        """The parameters themselves: direct delivery."""
        return self._followed.now()[1]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Let nobody in until ``resume``, and wait until nobody is inside; all modes mean the same here."""
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._users, timeout):
                raise DeadlineExceeded(f"the module was in use for more than {timeout:g} s (in_use() never ended)")
            self.version = None

    def begin(self) -> None:
        """The next load looks where the parameters are, once for all buckets."""
        self._moved = True

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors into the parameters of the same names."""
        if self._moved or self._loader is None:
            shards = self.shards()
            if self._loader is None or shards is not self._loader_of:
                self._loader, self._loader_of = ShardLoader(shards), shards
            self._moved = False
        self._loader.load(tensors)

    def finish(self, version: Version) -> None:
        """Take the version's label."""
        self.version = version

    def resume(self) -> None:
        """Let the module be used again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()
