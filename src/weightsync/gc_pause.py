"""Python's garbage collection held off where it would cost most."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class _Hold:
    """Who holds collection off now, and the thresholds to put back.

    Sets the first threshold to 0 instead of calling ``gc.disable()``: what the program itself enabled or disabled, before or
    meanwhile, stays as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = gc.get_threshold()

    def take(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = gc.get_threshold()
                gc.set_threshold(0, *self._before[1:])

    def release(self) -> None:
        with self._lock:
            if not self._holders:
                return  # taken before a fork, and this is the child
            self._holders -= 1
            if not self._holders:
                self._restore()

    def forked(self) -> None:
        """In a child: the threads that held collection off do not exist here."""
        self._lock = threading.Lock()
        if self._holders:
            self._holders = 0
            self._restore()

    def _restore(self) -> None:
        if gc.get_threshold()[0] == 0:  # else the program set its own meanwhile
            gc.set_threshold(*self._before)


_hold = _Hold()
os.register_at_fork(after_in_child=_hold.forked)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let Python's garbage wait: collecting all of it takes a tenth of a second in a process with many tensors, engines paused.

    May be nested and held by several threads. A child that is forked meanwhile collects as before.
    """
    _hold.take()
    try:
        yield
    finally:
        _hold.release()


@contextmanager
def collecting_later(seconds: float) -> Iterator[None]:
    """Like :func:`gc_paused`, but for at most ``seconds``: for processes that also run user code."""
    with ExitStack() as held:
        held.enter_context(gc_paused())
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        held.callback(timer.cancel)
        yield
