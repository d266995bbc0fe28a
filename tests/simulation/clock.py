"""An event loop whose clock jumps to the next timer when nothing else is ready: deadlines of minutes pass in microseconds.

Nothing may really wait on it: work for threads runs inline, a callback that blocks for seconds fails the program, and so does one
in which everybody waits and no timer is left (a wait without a deadline). It has no selector, so it has no sockets and no other
threads either.
"""

from __future__ import annotations

import asyncio
import itertools
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
"""Among more timers than these, cancelled ones are swept out now and then."""
_TURNS = 256
"""Turns of the loop between two looks at the real clock."""


class _Handle(list[Any]):
    """What :class:`asyncio.Handle` and :class:`asyncio.TimerHandle` are: moment, number, callback, arguments and context.

    A list is made and compared without code in Python: moments order timers, and numbers those of one moment. None is called that
    has no callback any more.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def cancel(self) -> None:
        """See :meth:`asyncio.Handle.cancel`."""
        self[2] = None
        self[3] = ()

    def cancelled(self) -> bool:
        """See :meth:`asyncio.Handle.cancelled`."""
        return self[2] is None

    def when(self) -> float:
        """See :meth:`asyncio.TimerHandle.when`."""
        moment: float = self[0]
        return moment


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. :meth:`time` starts at zero."""

    _ready: Any
    _scheduled: list[_Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.postponed: Callable[[Context], float] | None = None
        """Until when callbacks of a context stand still, while some do: their process holds its interpreter lock."""
        self._number = itertools.count().__next__
        self._many = _FEW_TIMERS
        """So many timers are looked at for cancelled ones."""

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def jump(self, seconds: float) -> None:
        """The machine slept: every timer of the next ``seconds`` is due at once."""
        self.now += seconds

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_soon`."""
        handle = _Handle((0.0, 0, callback, args, copy_context() if context is None else context))
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_at`."""
        timer = _Handle((when, self._number(), callback, args, copy_context() if context is None else context))
        heappush(self._scheduled, timer)
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See :meth:`asyncio.loop.call_later`."""
        timer = _Handle((self.now + delay, self._number(), callback, args, copy_context() if context is None else context))
        heappush(self._scheduled, timer)
        return timer

    def _run_once(self) -> None:
        """Turns, until the loop is stopped."""
        while True:
            started = time.monotonic()
            self._turns()
            blocked = time.monotonic() - started
            if blocked > _BLOCKING_SECONDS:
                raise RuntimeError(f"a callback blocked the event loop for {blocked:.1f} real seconds")
            if self._stopping:
                return

    def _turns(self) -> None:
        """Some turns, which together take no time worth speaking of."""
        ready, scheduled = self._ready, self._scheduled
        begin, end, take = ready.append, ready.popleft, heappop
        for _ in range(_TURNS):
            if len(scheduled) > self._many:
                self._sweep()
            while scheduled and scheduled[0][2] is None:  # so that it does not move the clock
                take(scheduled)
            if scheduled:
                first = scheduled[0][0]
                if first > self.now and not (ready or self._stopping):
                    self.now = first
                due = self.now + _RESOLUTION
                while scheduled and scheduled[0][0] < due:
                    begin(take(scheduled))
            elif not (ready or self._stopping):
                raise RuntimeError("everybody waits, and no timer is left: somewhere a wait has no deadline")
            for _ in range(len(ready)):
                handle = end()
                callback = handle[2]
                if callback is None:
                    continue
                context = handle[4]
                if self.postponed is not None and (until := self.postponed(context)) > self.now:
                    self.call_at(until, begin, handle, context=context)
                    continue
                try:
                    context.run(callback, *handle[3])
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio's own loop
                    self.call_exception_handler({"message": f"Exception in callback {callback}", "exception": error})
            handle = callback = None  # which would keep the callback's objects alive
            if self._stopping:
                return

    def _sweep(self) -> None:
        """Keep cancelled timers from becoming many."""
        self._scheduled[:] = [timer for timer in self._scheduled if timer[2] is not None]
        heapify(self._scheduled)
        self._many = max(_FEW_TIMERS, 2 * len(self._scheduled))

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
