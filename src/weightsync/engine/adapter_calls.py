"""Serializes calls into an engine rank's adapters, and records the current call and the last driver."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.model import PauseMode, Version
from weightsync.spans import span
from weightsync.tensors.shards import Shard

_log = logging.getLogger(__name__)
_Hook = Callable[[], None]
_PAUSED = "_weightsync_paused"
"""Attribute of an adapter whose last ``pause`` succeeded, if no ``resume`` has begun since."""


class _Driven:
    """Lock and state that all drivers of one adapter share. It is stored on the adapter; of several, on the first."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.paused_by = 0
        """The number of the last call that paused the engine for an update, by any driver. Calls of all drivers share numbers."""
        self.running: tuple[str, float] | None = None
        self.driver: weakref.ref[AdapterCalls] | None = None
        self.drivers = weakref.WeakSet[AdapterCalls]()
        self.later: list[_Hook] = []
        """Called when the current turn ends."""


class AdapterCalls:
    """Calls ``adapters``, those of one engine rank, on behalf of ``member``, who holds :attr:`turn` meanwhile.

    ``pause`` does nothing while the engine is paused, so an adapter need not remember that it is; one that says ``pauses_twice`` is
    asked again. A ``pause`` that raised, and a ``resume`` that raised, leave an engine that may be generating: then any is.

    One adapter may be driven in several ways: a coordinator's rounds, and updates from outside, by turns. A driver that pauses or
    writes it takes it; ``taken`` of the one who drove it before is called first, under :attr:`turn`: the bytes get another name.
    ``overwritten`` of every other one is called before each write.
    """

    def __init__(
        self, adapters: Sequence[EngineAdapter], member: str, taken: _Hook = lambda: None, overwritten: _Hook = lambda: None
    ) -> None:
        self._member, self._taken, self._overwritten = member, taken, overwritten
        self._adapters = adapters
        self.driven: _Driven = vars(adapters[0]).setdefault("_weightsync_driven", _Driven())
        self.driven.drivers.add(self)
        self.turn: threading.Lock = self.driven.turn
        """Held during everything that must not be mixed with what another one does with the same adapters."""

    @property
    def paused(self) -> bool:
        """Whether the last ``pause`` of every adapter succeeded and no ``resume`` has begun since."""
        return all(vars(adapter).get(_PAUSED, False) for adapter in self._adapters)

    @property
    def running(self) -> str | None:
        """For people: who is inside which call for how long; ``None`` if no call runs. Any thread."""
        running = self.driven.running
        if running is None:
            return None
        call, since = running
        return f"{call} for {time.monotonic() - since:.3g} s"

    def when_free(self, work: _Hook, timeout: float) -> bool:
        """Call ``work`` in a turn. Without one within ``timeout`` seconds, the end of whichever turn lasts calls it.

        Returns:
            Whether a turn came in time.
        """
        later = self.driven.later
        came = self.turn.acquire(timeout=timeout)
        later.append(work)
        if came or self.turn.acquire(blocking=False):  # the turn may have ended just before ``work`` was in the list
            self.end_turn()
        return came

    def end_turn(self) -> None:
        """Do what :meth:`when_free` left to do, and release :attr:`turn`."""
        later = self.driven.later
        while True:
            try:
                while later:
                    later.pop(0)()
            finally:
                self.turn.release()
            if not later or not self.turn.acquire(blocking=False):
                return

    @contextmanager
    def _call(self, adapter: EngineAdapter, method: str, phase: str = "") -> Iterator[None]:
        self.driven.running = f"{self._member} is inside {type(adapter).__name__}.{method}()", time.monotonic()
        try:
            with span(phase or method):
                yield
        finally:
            self.driven.running = None

    def _take(self) -> None:
        driver = self.driven.driver
        before = None if driver is None else driver()
        if before is self:
            return
        self.driven.driver = weakref.ref(self)
        if before is not None:
            _log.info("%s takes over the engine that %s updated until now", self._member, before._member)
            before._taken()

    def aborted(self, reason: str) -> None:
        """See :meth:`EngineAdapter.aborted`. Takes no turn. One that raises keeps nobody from pausing the engine."""
        for adapter in self._adapters:
            try:
                adapter.aborted(reason)
            except Exception:  # noqa: BLE001 - the adapter's own
                _log.exception("%s: %s.aborted() raised", self._member, type(adapter).__name__)

    def shards(self, phase: str = "") -> Sequence[Shard] | None:
        """See :meth:`EngineAdapter.shards`; of all adapters, if all have shards. ``phase`` names the call in traces."""
        every: list[Sequence[Shard]] = []
        for adapter in self._adapters:
            with self._call(adapter, "shards", phase):
                shards = adapter.shards()
            if shards is None:
                return None
            every.append(shards)
        return every[0] if len(every) == 1 else [shard for shards in every for shard in shards]

    def hold_parameters(self, seconds: float) -> None:
        """See :meth:`EngineAdapter.hold_parameters`."""
        for adapter in self._adapters:
            with self._call(adapter, "hold_parameters"):
                adapter.hold_parameters(seconds)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`EngineAdapter.pause` and :attr:`EngineAdapter.pauses_twice`."""
        self._take()
        for adapter in self._adapters:
            paused = vars(adapter).get(_PAUSED, False)
            if paused and not adapter.pauses_twice:
                continue
            # What was held by the first pause stays held: to abort it, or let it end, was not asked for then.
            asked: PauseMode = "keep" if paused else mode
            vars(adapter)[_PAUSED] = False
            with self._call(adapter, "pause"):
                adapter.pause(asked, timeout)
            vars(adapter)[_PAUSED] = True

    def begin(self) -> None:
        """See :meth:`EngineAdapter.begin`."""
        self._take()
        for other in set(self.driven.drivers) - {self}:
            other._overwritten()
        for adapter in self._adapters:
            with self._call(adapter, "begin"):
                adapter.begin()

    def wake_weights(self) -> None:
        """See :meth:`EngineAdapter.wake_weights`."""
        for adapter in self._adapters:
            with self._call(adapter, "wake_weights"):
                adapter.wake_weights()

    def load(self, index: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`EngineAdapter.load`; of one adapter."""
        adapter = self._adapters[index]
        with self._call(adapter, "load"):
            adapter.load(tensors)

    def keep(self, index: int, names: Collection[str]) -> None:
        """See :meth:`EngineAdapter.keep`; of one adapter."""
        self._adapters[index].keep(names)

    def finish(self, version: Version) -> None:
        """See :meth:`EngineAdapter.finish`."""
        for adapter in self._adapters:
            with self._call(adapter, "finish"):
                adapter.finish(version)

    def wake_cache(self) -> None:
        """See :meth:`EngineAdapter.wake_cache`."""
        for adapter in self._adapters:
            with self._call(adapter, "wake_cache"):
                adapter.wake_cache()

    def flush(self) -> str | None:
        """See :meth:`EngineAdapter.flush`. Returns the name of an adapter that refused to drop caches."""
        for adapter in self._adapters:
            with self._call(adapter, "flush"):
                if not adapter.flush():
                    return adapter.name
        return None

    def resume(self) -> None:
        """See :meth:`EngineAdapter.resume`."""
        for adapter in self._adapters:
            vars(adapter)[_PAUSED] = False
            with self._call(adapter, "resume"):
                adapter.resume()
