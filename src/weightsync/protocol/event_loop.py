"""The event loop of all links of this process: on a daemon thread of its own, which is there as long as one of them is.

A process with many ranks (several replicas in one, a trainer beside its own engine) has one such thread, not one for each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from weightsync import forks

__all__ = ["SharedLoop", "shared_loop"]

_START_SECONDS = 10.0

_Running = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class SharedLoop:
    """Counts its borrowers; the first starts the thread, the last ends it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._borrowers = 0
        self._running: _Running | None = None
        self._thread: threading.Thread | None = None

    def borrow(self) -> asyncio.AbstractEventLoop:
        """The running loop. :meth:`give_back` it once, with nothing of one's own left on it."""
        with self._lock:
            if self._running is None:
                started: Future[_Running] = Future()
                self._thread = threading.Thread(target=self._run, args=(started,), name="weightsync-links", daemon=True)
                self._thread.start()
                self._running = started.result(_START_SECONDS)
            self._borrowers += 1
            return self._running[0]

    def give_back(self, timeout: float) -> bool:
        """One borrower less; ``False`` if it was the last, and the thread did not end within ``timeout`` seconds."""
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
"""That of this process. In a forked child, where its thread does not run, it begins anew."""

os.register_at_fork(after_in_child=shared_loop.__init__)  # type: ignore[misc]
