"""Waits that a signal handler may interrupt at any point.

An exception of a handler (Ctrl-C, a watchdog) inside a concurrent future, an event or a condition can leave its lock held, and the
thread that completes it then blocks for ever. Here the interrupted thread holds nothing that the other one needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
_LOOK_SECONDS = 1.0


class Latch:
    """An event: set once, waited for by any number of threads."""

    def __init__(self) -> None:
        self._set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """End all waits. Never blocks. Idempotent."""
        self._set = True
        with suppress(RuntimeError):  # it was open
            self._closed.release()

    def wait(self, timeout: float) -> bool:
        """Return whether it was set within ``timeout`` seconds."""
        while not self._set and timeout > 0:
            # A signal that came just before the wait does not end it: Python looks for it again when this returns.
            if self._closed.acquire(timeout=min(timeout, _LOOK_SECONDS)):
                with suppress(RuntimeError):  # for other waiters; it was set again
                    self._closed.release()
            timeout -= _LOOK_SECONDS
        return self._set


class Outcome(Generic[T]):
    """Result or error of work on another thread. ``ended`` is called there when it is known, before any wait returns."""

    def __init__(self, ended: Callable[[Outcome[T]], object] | None = None) -> None:
        self.over = Latch()
        self.error: BaseException | None = None
        self._values: list[T] = []
        self._ended = ended

    def give(self, value: T) -> None:
        """End all waits with a result."""
        self._values.append(value)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End all waits with an error."""
        self.error = error
        self._end()

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do ``work`` on the current thread."""
        try:
            value = work(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the caller's to see
            self.fail(error)
        else:
            self.give(value)
        finally:
            del self  # its error's traceback refers to this frame

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        try:
            if ended is not None:
                ended(self)
        finally:
            self.over.set()

    def result(self) -> T:
        """Return the result, or raise the error. Call it after a wait for :attr:`over` that returned ``True``."""
        try:
            if self.error is not None:
                raise self.error
            return self._values[0]
        finally:
            del self  # its error's traceback refers to this frame
