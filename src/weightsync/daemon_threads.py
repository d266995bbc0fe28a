"""Threads that may wait for something else for minutes, and do not keep their process from ending."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThreads:
    """Up to ``most`` threads. A :class:`~concurrent.futures.ThreadPoolExecutor` would be joined when the interpreter ends."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._started = most, name, 0
        self._jobs: _Jobs = queue.SimpleQueue()
        self.close = weakref.finalize(self, _end, self._jobs, most)
        """Cancel what has not begun, and end the threads when they are idle. Never blocks. Safe twice."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do ``work`` on one of the threads. After :attr:`close` it is never done."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Do ``work`` on a daemon thread of that name, which ends with it. The process can end while it hangs."""
    jobs: _Jobs = queue.SimpleQueue()
    future: Future[T] = Future()
    jobs.put((future, work))
    jobs.put(None)
    threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
    return future


def _end(jobs: _Jobs, threads: int) -> None:
    with suppress(queue.Empty):
        while (job := jobs.get_nowait()) is not None:
            job[0].cancel()
    for _ in range(threads):
        jobs.put(None)


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller's to see
            future.set_exception(error)
        del job, future, work  # an error's traceback refers to this frame
