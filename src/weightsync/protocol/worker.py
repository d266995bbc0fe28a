"""Worker thread that runs one call at a time for an event loop that must not block."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Body

Handler = Callable[[Body, float], Body]


@dataclass(frozen=True, eq=False)
class IncomingCall:
    """A call of the coordinator, from its arrival on. It runs on another thread than it arrives on, and later."""

    body: Body
    run: Callable[[float], Body]
    """Answers the call within so many seconds. Runs on the worker's thread."""
    withdraw: Callable[[], str]
    """Handles the caller's withdrawal, and returns what keeps the rank busy, for display. Never blocks."""
    turn_seconds: float = math.inf
    """Seconds that the call may wait for its turn before it is refused."""
    yields: bool = False
    """Whether a rank that is too busy for the call is well: the call never waits for another."""
    beside: bool = False
    """Whether the call runs beside the others, on a thread for such calls."""


def received_for(handle: Handler) -> Callable[[Body], IncomingCall]:
    """Return a factory of calls that ``handle`` answers. They run to completion even after they are withdrawn."""
    return lambda body: IncomingCall(body, partial(handle, body), lambda: f"{type(body).__name__} is still running")


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
