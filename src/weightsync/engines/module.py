"""Adapter for a plain :class:`torch.nn.Module` as a rollout engine: the smallest complete adapter."""

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
    """Adapter that writes the parameters of ``module`` (plain or DTensor) in place, between two uses of the module.

    Run the module ``with adapter.in_use() as version:``. A round waits until that context ends, and the context cannot be entered
    during a round.

    Args:
        module: The module.
        include_buffers: Whether persistent buffers are updated too.
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
        self._moved = True  # parameters may have moved; the first load after a pause checks it, once for all buckets

    @contextmanager
    def in_use(self, timeout: float = 60.0) -> Iterator[Version | None]:
        """Block rounds inside the context, which yields the module's version (``None`` before the first). One user at a time.

        Raises:
            DeadlineExceeded: The module was paused or in use for ``timeout`` seconds.
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
        """Return the manifest of the module's parameters, and of its persistent buffers if included."""
        return self._followed.now()[0]

    def shards(self) -> Sequence[Shard]:
        """Return shards over the parameters, for direct delivery."""
        return self._followed.now()[1]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Block new uses until :meth:`resume`, and wait for the current one to end. All modes have the same effect."""
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._users, timeout):
                raise DeadlineExceeded(f"the module was in use for more than {timeout:g} s: in_use() did not end")
            self.version = None

    def begin(self) -> None:
        """Let the next load look up the addresses of the parameters, once for all buckets."""
        self._moved = True

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's part of each whole tensor into the parameter of the same name."""
        if self._moved or self._loader is None:
            shards = self.shards()
            if self._loader is None or shards is not self._loader_of:
                self._loader, self._loader_of = ShardLoader(shards), shards
            self._moved = False
        self._loader.load(tensors)

    def finish(self, version: Version) -> None:
        """Store the version."""
        self.version = version

    def resume(self) -> None:
        """Allow the module to be used again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()
