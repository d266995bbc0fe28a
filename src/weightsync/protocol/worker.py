"""Worker thread that runs one call at a time for an event loop that must not block."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Body

__all__ = ["Handler", "Received", "Worker", "received_for"]

Handler = Callable[[Body, float], Body]


class Received(Protocol):
    """A call of the coordinator that has arrived."""

    @property
    def patience(self) -> float:
        """Seconds that the call may wait for its turn before it is refused."""
        ...

    def run(self, timeout: float) -> Body:
        """Answer the call within ``timeout`` seconds. Runs on the worker's thread."""
        ...

    def withdraw(self) -> str:
        """Handle the caller's withdrawal. Never blocks.

        Returns:
            What keeps the rank busy, for display.
        """
        ...


@dataclass(frozen=True)
class _Plain:
    body: Body
    handle: Handler
    patience: float = math.inf

    def run(self, timeout: float) -> Body:
        return self.handle(self.body, timeout)

    def withdraw(self) -> str:
        return f"{type(self.body).__name__} is still running"


def received_for(handle: Handler) -> Callable[[Body], Received]:
    """Return a factory of calls that ``handle`` answers. They run to completion even after they are withdrawn."""
    return lambda body: _Plain(body, handle)


_Job = tuple[Callable[[float], Body | None], str, Deadline, "Future[Body | None]", contextvars.Context]


class Worker:
    """Runs calls on its own thread in the order of :meth:`submit`. The first call starts the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[float], Body | None], what: str, timeout: float) -> Future[Body | None]:
        """Queue one call, to run in the caller's context. Its ``timeout`` starts now and includes the time in the queue.

        Not thread-safe.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        outcome: Future[Body | None] = Future()
        self._jobs.put((run, what, Deadline(timeout), outcome, contextvars.copy_context()))
        return outcome

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, what, deadline, outcome, context = job
            if not outcome.set_running_or_notify_cancel():
                del job, run, outcome, context
                continue
            try:
                outcome.set_result(context.run(run, deadline.remaining(f"waiting for the {what} call's turn")))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                outcome.set_exception(error)
            del job, run, outcome, context  # an idle thread must not keep the last call's data alive

    def close(self, timeout: float) -> bool:
        """End the thread after its current call.

        Returns:
            ``False`` if that took longer than ``timeout`` seconds.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._jobs.put(None)
        thread.join(timeout)
        return not thread.is_alive()
