"""Work of a trainer on another thread, so that a signal handler in the thread that publishes does not end it halfway."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec

from weightsync.errors import Aborted
from weightsync.outcome import Latch, Outcome
from weightsync.protocol.messages import RoundResult

P = ParamSpec("P")

_LONGEST_SECONDS = 7 * 86400.0  # of a call to the coordinator


def wait_until_free(lock: threading.RLock, timeout: float) -> None:
    """Wait until no other thread holds ``lock``, at most ``timeout`` seconds."""
    if lock.acquire(timeout=timeout):
        lock.release()


def complete(future: Future[RoundResult], asked: Outcome[RoundResult], placing: Latch) -> None:
    """The round is over: end the wait for the copy, and complete the caller's ``future`` with what ``asked`` brought."""
    placing.set()
    if not future.set_running_or_notify_cancel():
        return
    if asked.error is not None:
        future.set_exception(asked.error)
    else:
        future.set_result(asked.result())


class Background:
    """Runs work in the order of :meth:`submit`, each piece on a thread that the process waits for at its end."""

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"{name}-start", daemon=True).start()

    def submit(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run ``work`` when what was submitted before has ended.

        Raises:
            Aborted: This was closed.
        """
        if self._closed:
            raise Aborted("this trainer was closed and cannot publish any more")
        self._work.put(partial(work, *args, **kwargs))  # no frame of ours: errors' tracebacks would keep it

    def close(self) -> None:
        """Take no more work. What was submitted still runs."""
        self._closed = True
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            thread = threading.Thread(target=work, name=self._name)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now
                work()
            else:
                thread.join(_LONGEST_SECONDS)
            del work, thread  # an idle thread must not keep the last publication's data alive
