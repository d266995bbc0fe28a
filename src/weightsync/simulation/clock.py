"""An event loop whose clock jumps to the next timer when nothing else is ready: deadlines of minutes pass in microseconds.

Nothing may really wait on it: work for threads runs inline, a callback that blocks for seconds fails the program, and so does one
in which everybody waits and no timer is left (a wait without a deadline).
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run"]

T = TypeVar("T")

_BLOCKING_SECONDS = 20.0  # of real time between two looks at the selector; generous, the machine may be busy


class _JumpingSelector(selectors.DefaultSelector):
    """Asks the real selector without waiting, and moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._seen = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now = time.monotonic()
        blocked, self._seen = now - self._seen, now
        if blocked > _BLOCKING_SECONDS:
            raise RuntimeError(f"a callback blocked the event loop for {blocked:.1f} real seconds")
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("everybody waits, and no timer is left: somewhere a wait has no deadline")
            self.now += max(timeout, 0.0)
        self._seen = time.monotonic()
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. :meth:`time` starts at zero."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    def jump(self, seconds: float) -> None:
        """The machine slept: every timer of the next ``seconds`` is due at once."""
        self._jumping.now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # noqa: ANN401
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
