"""The calls of one engine rank on its adapter: never a second pause without a resume, and always known which call is running."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.messages import PauseMode
from weightsync.model import Version
from weightsync.roles.adapter import EngineAdapter
from weightsync.tensors.shards import Shard

__all__ = ["AdapterCalls"]


class AdapterCalls:
    """Calls ``adapter`` on behalf of ``member``, one call at a time.

    ``pause`` does nothing while the engine is paused, so an adapter need not remember that it is. A ``pause`` that raised, and a
    ``resume`` that raised, leave an engine that may be generating: then ``pause`` is called again.
    """

    def __init__(self, adapter: EngineAdapter, member: str) -> None:
        self._adapter, self._member = adapter, member
        self._running: tuple[str, float] | None = None

    @property
    def paused(self) -> bool:
        """Whether the adapter's last ``pause`` succeeded and no ``resume`` has begun since."""
        return self._adapter._weightsync_paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._adapter._weightsync_paused = paused

    @property
    def running(self) -> str | None:
        """For people: which rank is inside which call for how long; ``None`` if no call runs. Any thread."""
        running = self._running
        if running is None:
            return None
        method, since = running
        seconds = time.monotonic() - since
        return f"{self._member} is inside {type(self._adapter).__name__}.{method}() for {seconds:.3g} s"

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        self._running = method, time.monotonic()
        try:
            yield
        finally:
            self._running = None

    def shards(self) -> Sequence[Shard] | None:
        """See :meth:`EngineAdapter.shards`."""
        with self._call("shards"):
            return self._adapter.shards()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`EngineAdapter.pause`. Returns at once if the engine is paused."""
        if self.paused:
            return
        with self._call("pause"):
            self._adapter.pause(mode, timeout)
        self.paused = True

    def begin(self) -> None:
        """See :meth:`EngineAdapter.begin`."""
        with self._call("begin"):
            self._adapter.begin()

    def wake_weights(self) -> None:
        """See :meth:`EngineAdapter.wake_weights`."""
        with self._call("wake_weights"):
            self._adapter.wake_weights()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`EngineAdapter.load`."""
        with self._call("load"):
            self._adapter.load(tensors)

    def finish(self, version: Version) -> None:
        """See :meth:`EngineAdapter.finish`."""
        with self._call("finish"):
            self._adapter.finish(version)

    def wake_cache(self) -> None:
        """See :meth:`EngineAdapter.wake_cache`."""
        with self._call("wake_cache"):
            self._adapter.wake_cache()

    def flush(self) -> bool:
        """See :meth:`EngineAdapter.flush`."""
        with self._call("flush"):
            return self._adapter.flush()

    def resume(self) -> None:
        """See :meth:`EngineAdapter.resume`."""
        self.paused = False
        with self._call("resume"):
            self._adapter.resume()
