"""The calls on an adapter of one that drives it: one call at a time, always known which, and known who drove it last."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.model import PauseMode, Version
from weightsync.tensors.shards import Shard

__all__ = ["AdapterCalls"]

_log = logging.getLogger(__name__)


class _Driven:
    """What all who drive one adapter must agree about. It lies on the adapter, so that they need not know each other."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.paused = False
        self.running: tuple[str, float] | None = None
        self.driver: weakref.ref[AdapterCalls] | None = None


class AdapterCalls:
    """Calls ``adapter`` on behalf of ``member``, who holds :attr:`turn` meanwhile.

    ``pause`` does nothing while the engine is paused, so an adapter need not remember that it is; one that says ``pauses_twice`` is
    asked again. A ``pause`` that raised, and a ``resume`` that raised, leave an engine that may be generating: then any is.

    One adapter may be driven in several ways: a coordinator's rounds, and updates from outside, by turns. Whoever pauses or writes
    it takes it; ``taken`` of the one who drove it before is called first, under :attr:`turn`: the bytes get another name.
    """

    def __init__(self, adapter: EngineAdapter, member: str, taken: Callable[[], None] = lambda: None) -> None:
        self._adapter, self._member, self._taken = adapter, member, taken
        self._driven: _Driven = vars(adapter).setdefault("_weightsync_driven", _Driven())

    @property
    def turn(self) -> threading.Lock:
        """Held during everything that must not be mixed with what another one does with the same adapter."""
        return self._driven.turn

    @property
    def paused(self) -> bool:
        """Whether the adapter's last ``pause`` succeeded and no ``resume`` has begun since."""
        return self._driven.paused

    @property
    def running(self) -> str | None:
        """For people: who is inside which call for how long; ``None`` if no call runs. Any thread."""
        running = self._driven.running
        if running is None:
            return None
        call, since = running
        return f"{call} for {time.monotonic() - since:.3g} s"

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        self._driven.running = f"{self._member} is inside {type(self._adapter).__name__}.{method}()", time.monotonic()
        try:
            yield
        finally:
            self._driven.running = None

    def _take(self) -> None:
        driver = self._driven.driver
        before = None if driver is None else driver()
        if before is self:
            return
        self._driven.driver = weakref.ref(self)
        if before is not None:
            _log.info("%s takes over the engine that %s updated until now", self._member, before._member)
            before._taken()

    def shards(self) -> Sequence[Shard] | None:
        """See :meth:`EngineAdapter.shards`."""
        with self._call("shards"):
            return self._adapter.shards()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`EngineAdapter.pause` and :attr:`EngineAdapter.pauses_twice`."""
        self._take()
        if self.paused:
            if not self._adapter.pauses_twice:
                return
            mode = "keep"  # what was held by the first pause stays held: to abort it, or let it end, was not asked for then
        self._driven.paused = False
        with self._call("pause"):
            self._adapter.pause(mode, timeout)
        self._driven.paused = True

    def begin(self) -> None:
        """See :meth:`EngineAdapter.begin`."""
        self._take()
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
        self._driven.paused = False
        with self._call("resume"):
            self._adapter.resume()
