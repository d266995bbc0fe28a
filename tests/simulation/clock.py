"""An event loop whose clock jumps to the next timer when nothing else is ready: deadlines of minutes pass in microseconds.

Nothing may really wait on it: work for threads runs inline, a callback that blocks for seconds fails the program, and so does one
in which everybody waits and no timer is left (a wait without a deadline). It has no selector, so it has no sockets and no other
threads either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run"]

T = TypeVar("T")

_BLOCKING_SECONDS = 60.0  # of real time in one turn of the loop; generous, the machine may be busy
_RESOLUTION = 1e-9
"""Seconds that a timer may be early, as in asyncio's own loop."""
_FEW_TIMERS = 100
"""Among more timers than these, cancelled ones are swept out when they are the majority."""


class _Handle:
    """What :class:`asyncio.Handle` is, without what a debugger wants to know."""

    __slots__ = ("arguments", "callback", "context", "dropped")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.arguments = callback, arguments
        self.context = copy_context() if context is None else context
        self.dropped = False

    def cancel(self) -> None:
        """See :meth:`asyncio.Handle.cancel`."""
        self.dropped = True
        self.callback, self.arguments = _nothing, ()

    def cancelled(self) -> bool:
        """See :meth:`asyncio.Handle.cancelled`."""
        return self.dropped


class _Timer(_Handle):
    """What :class:`asyncio.TimerHandle` is. None is less than another: moments order timers, and the heap those of one moment."""

    __slots__ = ("loop", "moment", "queued")

    def __init__(
        self,
        loop: VirtualTimeLoop,
        moment: float,
        callback: Callable[..., object],
        arguments: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.callback, self.arguments = callback, arguments
        self.context = copy_context() if context is None else context
        self.dropped = False
        self.loop, self.moment, self.queued = loop, moment, True

    def __lt__(self, other: _Timer) -> bool:
        return False

    def cancel(self) -> None:
        """See :meth:`asyncio.Handle.cancel`."""
        if not self.dropped and self.queued:
            self.loop.dropped += 1
        self.dropped = True
        self.callback, self.arguments = _nothing, ()

    def when(self) -> float:
        """See :meth:`asyncio.TimerHandle.when`."""
        return self.moment


def _nothing() -> None:
    """Stands in for the callback of a cancelled handle."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. :meth:`time` starts at zero."""

    _ready: Any
    _scheduled: list[tuple[float, _Timer]]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.postponed: Callable[[Context], float] | None = None
        """Until when callbacks of a context stand still, while some do: their process holds its interpreter lock."""
        self.dropped = 0
        """Cancelled timers that are still in the heap."""

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def jump(self, seconds: float) -> None:
        """The machine slept: every timer of the next ``seconds`` is due at once."""
        self.now += seconds

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_soon`."""
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_at`."""
        timer = _Timer(self, when, callback, args, context)
        heappush(self._scheduled, (when, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_later`."""
        when = self.now + delay
        timer = _Timer(self, when, callback, args, context)
        heappush(self._scheduled, (when, timer))
        return timer

    def _run_once(self) -> None:
        """Turns, until the loop is stopped."""
        ready, scheduled, clock = self._ready, self._scheduled, time.monotonic
        seen = clock()
        while True:
            if len(scheduled) > _FEW_TIMERS and self.dropped > len(scheduled) / 2:
                self._sweep()
            while scheduled and scheduled[0][1].dropped:  # so that it does not move the clock
                heappop(scheduled)
                self.dropped -= 1
            before, seen = seen, clock()
            blocked = seen - before
            if blocked > _BLOCKING_SECONDS:
                raise RuntimeError(f"a callback blocked the event loop for {blocked:.1f} real seconds")
            if not (ready or self._stopping):
                if not scheduled:
                    raise RuntimeError("everybody waits, and no timer is left: somewhere a wait has no deadline")
                self.now += max(scheduled[0][0] - self.now, 0.0)
            due = self.now + _RESOLUTION
            while scheduled and scheduled[0][0] < due:
                timer = heappop(scheduled)[1]
                timer.queued = False
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.dropped:
                    continue
                if self.postponed is not None and (until := self.postponed(handle.context)) > self.now:
                    self.call_at(until, ready.append, handle, context=handle.context)
                    continue
                try:
                    handle.context.run(handle.callback, *handle.arguments)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio's own loop
                    self.call_exception_handler({"message": f"Exception in callback {handle.callback}", "exception": error})
            handle = None  # which would keep its callback's objects alive
            if self._stopping:
                return

    def _sweep(self) -> None:
        """Keep cancelled timers from becoming many."""
        self._scheduled[:] = [entry for entry in self._scheduled if not entry[1].dropped]
        heapify(self._scheduled)
        self.dropped = 0

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run ``func`` here and now; nothing else moves meanwhile."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like :func:`asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
