"""Shared event loop of all coordinator connections of this process, on a daemon thread that exists while a connection does.

A process with many ranks (several replicas, or a trainer beside its own engine) has one such thread instead of one for each rank.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from weightsync import forks

_START_SECONDS = 10.0

_Running = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class SharedLoop:
    """Reference-counted event loop: the first borrower starts its thread, the last one ends it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._borrowers = 0
        self._running: _Running | None = None
        self._thread: threading.Thread | None = None

    def borrow(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. Call :meth:`give_back` once, after all work on the loop has ended."""
        with self._lock:
            if self._running is None:
                started: Future[_Running] = Future()
                self._thread = threading.Thread(target=self._run, args=(started,), name="weightsync-links", daemon=True)
                self._thread.start()
                self._running = started.result(_START_SECONDS)
            self._borrowers += 1
            return self._running[0]

    def give_back(self, timeout: float) -> bool:
        """Release the loop.

        Returns:
            ``False`` if this was the last borrower and the thread did not end within ``timeout`` seconds; else ``True``.
        """
        with self._lock:
            self._borrowers -= 1
            if self._borrowers or self._running is None or self._thread is None:
                return True
            (loop, stop), thread = self._running, self._thread
            self._running = self._thread = None
        loop.call_soon_threadsafe(stop.set)
        if thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    @staticmethod
    def _run(started: Future[_Running]) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()  # ends with the last borrower

        forks.run(main())


shared_loop = SharedLoop()
"""The loop of this process. A forked child starts its own, because threads do not survive a fork."""

os.register_at_fork(after_in_child=shared_loop.__init__)  # type: ignore[misc]
