"""A thread that runs one call at a time for an event loop that must not block."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from weightsync.deadline import Deadline
from weightsync.messages import Body

__all__ = ["Worker"]

Handler = Callable[[Body, float], Body]
_Job = tuple[Body, Deadline, "Future[Body]"]


class Worker:
    """Runs ``handle`` on its own thread, in the order of :meth:`submit`. The thread starts with the first call."""

    def __init__(self, name: str, handle: Handler) -> None:
        self._name, self._handle = name, handle
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, body: Body, timeout: float) -> Future[Body]:
        """Queue one call; its ``timeout`` runs from now, so waiting for its turn counts. Called from one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        outcome: Future[Body] = Future()
        self._jobs.put((body, Deadline(timeout), outcome))
        return outcome

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            body, deadline, outcome = job
            if not outcome.set_running_or_notify_cancel():
                continue
            try:
                left = deadline.remaining(f"waiting for the {type(body).__name__} call's turn")
                outcome.set_result(self._handle(body, left))
            except BaseException as error:  # noqa: BLE001 - the caller's to see, whatever it is
                outcome.set_exception(error)
            del job, body, outcome  # an idle thread must not keep the last call's data alive

    def close(self, timeout: float) -> bool:
        """End the thread after the call that it runs; ``False`` if that took longer than ``timeout`` seconds."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        return not thread.is_alive()
