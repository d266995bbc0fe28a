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
from weightsync.tensors.shards import FollowedShards, Shard

__all__ = ["ModuleAdapter"]


class ModuleAdapter(EngineAdapter):
    """Parameters of ``module`` (plain or DTensor) are written in place, between two uses of it.

    Whoever runs the module does so ``with adapter.in_use() as version:``; a round waits for that and holds it off meanwhile.
    """

    name = "module"

    def __init__(self, module: torch.nn.Module, *, buffers: bool = False) -> None:
        self.module = module
        self.version: Version | None = None
        self._followed = FollowedShards(module, buffers=buffers)
        self._changed = threading.Condition()
        self._paused = False
        self._users = 0
        self._own: dict[str, tuple[Shard, torch.Tensor]] | None = None

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
        self._own = None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors into the parameters of the same names."""
        if self._own is None:
            self._own = {shard.name: (shard, _bits(shard.tensor)) for shard in self.shards()}
        own, targets, parts = self._own, list[torch.Tensor](), list[torch.Tensor]()
        for name, tensor in tensors:
            if not tensor.numel():
                continue
            if name not in own:
                raise LoadError(f"the module has no parameter named {name!r}")
            shard, bits = own[name]
            if tensor.dtype != shard.tensor.dtype:
                raise LoadError(f"{name} is {shard.tensor.dtype} in the module, and came as {tensor.dtype}")
            region = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
            targets.append(bits)
            parts.append(_bits(tensor[region] if shard.box.shape != shard.shape else tensor))
        if targets:
            torch._foreach_copy_(targets, parts)  # on a GPU a launch for many tensors, not one for each

    def finish(self, version: Version) -> None:
        """Take the version's label."""
        self.version = version

    def resume(self) -> None:
        """Let the module be used again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch copies many tensors at once by way of float32, which would give a NaN other bits."""
    kind = _INTEGERS.get(tensor.element_size())
    return tensor if kind is None else tensor.view(kind)
