"""The event loop of one SGLang scheduler: calls on its thread between two passes, and control requests for all ranks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from weightsync.closing import Closeable
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, LoadError
from weightsync.model import PauseMode

# Seconds for which rank 0's loop leaves the interpreter to other threads in a pass, while it is paused, and while it is idle.
# SGLang's would spin, and take the interpreter again before a thread that waits for it has woken up: messages took up to 140 ms.
_NAP = 0.005
_IDLE_NAP = 0.0001

_log = logging.getLogger(__name__)

T = TypeVar("T")


Scheduler: TypeAlias = Any
"""``sglang.srt.managers.scheduler.Scheduler``. :data:`weightsync.releases.RELEASES` lists the methods that are needed of it."""
Requests: TypeAlias = Any
"""``sglang.srt.managers.io_struct``: SGLang's classes of requests."""


@dataclass(frozen=True)
class WakeUp:
    """Request that every rank takes released memory again, in the same pass, because SGLang waits at a barrier for all of them.

    SGLang's own request of this kind would send a response that no client expects.
    """

    tags: tuple[str, ...]


def drop_caches(scheduler: Scheduler, embeddings: Any) -> bool:  # noqa: ANN401 - SGLang's embedding cache, or None
    """Drop all keys, values and embeddings of a paused ``scheduler``, on its thread. Returns whether that succeeded.

    ``embeddings`` are what the model's vision or audio part computed, which ``flush_cache`` leaves as it is.
    SGLang refuses while grammars are compiled. The requests that wait for them have no keys and values, and a paused scheduler does
    not go on with them, so they are set aside.
    """
    grammars = scheduler.grammar_manager
    waiting, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        dropped = bool(scheduler.flush_cache(empty_cache=False))
    finally:
        grammars.grammar_queue = waiting
    if embeddings is not None:
        embeddings.clear()
    return dropped


class SchedulerLoop(Closeable):
    """One scheduler's event loop, seen from weightsync's thread. SGLang's thread calls :meth:`received` and :meth:`pass_through`.

    Rank 0 of SGLang's tensor-parallel group ``leads``: it broadcasts the requests of each pass, so those that it adds reach all
    ranks in the same pass. Ranks that do not lead only wait. None of these requests has a response.
    """

    def __init__(self, scheduler: Scheduler, requests: Requests, *, leads: bool) -> None:
        self._scheduler, self._requests, self.leads = scheduler, requests, leads
        self._work = (
            requests.TokenizedGenerateReqInput,
            requests.TokenizedEmbeddingReqInput,
            requests.BatchTokenizedGenerateReqInput,
            requests.BatchTokenizedEmbeddingReqInput,
        )
        self._switches = (requests.PauseGenerationReqInput, requests.ContinueGenerationReqInput)
        self._writes = (
            requests.UpdateWeightFromDiskReqInput,
            requests.UpdateWeightsFromDistributedReqInput,
            requests.UpdateWeightsFromTensorReqInput,
            requests.UpdateWeightsFromIPCReqInput,
            requests.ReleaseMemoryOccupationReqInput,
        )
        self._changed = threading.Condition()
        self._outbox: list[object] = []
        self._sent: list[Future[None]] = []  # resolved after the pass that carries the outbox
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._pausing: tuple[Callable[[], bool], list[object], Future[None]] | None = None
        self._holding = False
        self._held: list[object] = []
        self._paused = False
        self._asleep: frozenset[str] = frozenset()  # what SGLang has released: weights, kv_cache, cuda_graph
        self._disturbance = ""  # type of a request by which another client wrote weights while the engine was paused
        self._wake_error: Exception | None = None
        self._closed = False
        self.handlers: dict[type, Callable[[Any], None]] = {WakeUp: self._wake}
        """By their types, requests that are not SGLang's to process. Each rank calls them in the same pass. They raise nothing."""

    # On SGLang's thread.

    def received(self, pulled: list[object] | None) -> None:
        """Change the requests ``pulled`` from the sockets of this rank, before SGLang broadcasts them. ``None``: it pulls none.

        From a pause to :meth:`proceed` rank 0 holds back new work, and requests of other clients to continue, which would let all
        ranks generate from weights that are partly written.
        """
        if pulled is None or not self.leads:
            return
        with self._changed:
            if self._pausing is not None and (self._paused or self._pausing[0]()):
                _, requests, sent = self._pausing
                self._outbox += requests
                self._sent.append(sent)
                self._pausing = None
            if self._holding:
                self._hold(pulled)
            else:
                pulled[:0] = self._held
                self._held.clear()
            pulled += self._outbox
            self._outbox.clear()

    def _hold(self, pulled: list[object]) -> None:
        """Move requests that wait for the continuation out of ``pulled``.

        Aborts wait as well as pass, because the requests that they name may be held back or in SGLang.
        """
        passed: list[object] = []
        for request in pulled:
            switches = isinstance(request, self._switches)
            if switches and not any(type(held) is type(request) for held in self._held):
                _log.warning("weightsync: a %s of another client waits until the update has ended", type(request).__name__)
            waits = switches or isinstance(request, self._work)
            if waits or isinstance(request, self._requests.AbortReq):
                self._held.append(request)
            if not waits:
                passed.append(request)
        pulled[:] = passed

    def pass_through(self, process: Callable[[list[object]], None], requests: Sequence[object]) -> None:
        """Let SGLang ``process`` the ``requests`` of one pass, and then run the calls that wait."""
        with self._changed:
            carried = 0 if self._outbox else len(self._sent)
        for request in requests:
            if type(request) in self.handlers:
                self.handlers[type(request)](request)
        if self._scheduler._engine_paused:
            self._disturbance = next(
                (type(request).__name__ for request in requests if isinstance(request, self._writes)), self._disturbance
            )
        process([request for request in requests if type(request) not in self.handlers])
        with self._changed:
            was_paused, self._paused = self._paused, bool(self._scheduler._engine_paused)
            self._asleep = frozenset(self._scheduler.weight_updater.offload_tags)
            if was_paused and not self._paused:  # continued, perhaps by another client
                self._holding = self._pausing is not None
            sent, self._sent = self._sent[:carried], self._sent[carried:]
        for future in sent:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        with self._changed:
            self._changed.notify_all()
            if self.leads and not self._calls and not self._outbox:
                if self._paused:
                    self._changed.wait(_NAP)
                elif not requests and self._scheduler.last_batch is None:
                    self._changed.wait(_IDLE_NAP)
            calls = [*self._calls]
            self._calls.clear()
        for future, work in calls:
            self._run(future, work)

    def _wake(self, request: WakeUp) -> None:
        updater = self._scheduler.weight_updater
        tags = tuple(tag for tag in request.tags if tag in updater.offload_tags)
        try:
            if tags:
                updater.resume_memory_occupation(self._requests.ResumeMemoryOccupationReqInput(tags=list(tags)))
        except Exception as error:  # noqa: BLE001 - raised where the round waits for it; SGLang would end
            with self._changed:
                self._wake_error = error

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if not self._scheduler._engine_paused:
                raise LoadError("SGLang was continued by another client during the update")
            if self._disturbance:
                raise LoadError(f"another client sent SGLang a {self._disturbance} during the update")
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the round waits for it
            future.set_exception(error)

    def close(self) -> None:
        """End: what waits is refused, and so is every later call. Called when the event loop has ended. Idempotent."""
        with self._changed:
            self._closed = True
            pending = [*self._sent, *(future for future, _ in self._calls)]
            if self._pausing is not None:
                pending.append(self._pausing[2])
            self._sent, self._pausing = [], None
            self._calls.clear()
            self._changed.notify_all()
        for future in pending:
            if future.set_running_or_notify_cancel():
                future.set_exception(Aborted("SGLang's scheduler has ended"))

    # On weightsync's thread.

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Return when no rank computes. None does until :meth:`proceed`.

        With ``abort`` all requests end, with ``keep`` they go back to the queue. With ``wait`` those that this rank has are
        finished first.

        Raises:
            DeadlineExceeded: ``timeout`` passed.
            Aborted: The scheduler has ended.
        """
        deadline = Deadline(timeout)
        self._disturbance = ""
        self._wake_error = None  # from here on, since rank 0 may wake all ranks before this one waits for it
        if self.leads:
            self._send_pause(mode, deadline)
        self._wait(lambda: self._paused, deadline, "SGLang's scheduler did not pause")

    def _send_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        scheduler, sent = self._scheduler, Future[None]()
        # Running requests go back to the queue without their keys and values, which are computed again later.
        requests = [self._requests.PauseGenerationReqInput(mode="retract")]
        if mode == "abort":
            requests.append(self._requests.AbortReq(abort_all=True))
        ready = scheduler.is_fully_idle if mode == "wait" else lambda: not scheduler.grammar_manager.grammar_queue
        with self._changed:
            self._check_open()
            self._pausing, self._holding = (ready, requests, sent), True
        try:
            _await(sent, deadline, "SGLang's requests did not end" if mode == "wait" else "SGLang's scheduler made no pass")
        except BaseException:
            with self._changed:
                self._pausing, self._holding = None, self._paused
            raise

    def proceed(self, timeout: float) -> None:
        """Generate again.

        Raises:
            DeadlineExceeded: ``timeout`` passed.
            Aborted: The scheduler has ended.
        """
        deadline = Deadline(timeout)
        if self.leads:
            self.send(deadline, "continuing", self._requests.ContinueGenerationReqInput(torch_empty_cache=False))
        else:  # otherwise the next pause could take this one for its own
            self._wait(lambda: not self._paused, deadline, "SGLang's scheduler did not continue")

    def wake(self, tags: Sequence[str], timeout: float) -> None:
        """Take the released memory of ``tags`` again, on all ranks in the same pass.

        Raises:
            DeadlineExceeded: ``timeout`` passed.
            LoadError: SGLang failed.
            Aborted: The scheduler has ended.
        """
        if not self._asleep.intersection(tags):
            return
        deadline = Deadline(timeout)
        if self.leads:
            self.send(deadline, "waking up", WakeUp(tuple(tags)))
        self._wait(
            lambda: not self._asleep.intersection(tags) or self._wake_error is not None, deadline, "SGLang's memory did not return"
        )
        error, self._wake_error = self._wake_error, None
        if error is not None:
            raise LoadError(f"SGLang could not take its released memory again: {error!r}") from error

    def call(self, work: Callable[[], T], timeout: float) -> T:
        """Run ``work`` on SGLang's thread while it is paused, and return the result or raise its error.

        Raises:
            DeadlineExceeded: ``timeout`` passed. Work that had not begun does not run.
            LoadError: SGLang is not paused.
            Aborted: The scheduler has ended.
        """
        future: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._calls.append((future, work))
            self._changed.notify_all()
        return _await(future, Deadline(timeout), "SGLang's scheduler did not run a call")

    def send(self, deadline: Deadline, what: str, *requests: object) -> None:
        """On rank 0, add ``requests`` to those that all ranks get in the next pass, and wait until that has been made.

        Raises:
            DeadlineExceeded: It was not made in time. It may still be made.
            Aborted: The scheduler has ended.
        """
        sent: Future[None] = Future()
        with self._changed:
            self._check_open()
            self._outbox += requests
            self._sent.append(sent)
            self._changed.notify_all()
        _await(sent, deadline, f"SGLang's scheduler made no pass ({what})")

    def _wait(self, condition: Callable[[], bool], deadline: Deadline, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self._closed, deadline.remaining(what)):
                raise DeadlineExceeded(f"{what} in time")
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise Aborted("SGLang's scheduler has ended")


def _await(future: Future[T], deadline: Deadline, what: str) -> T:
    try:
        return future.result(deadline.remaining(what))
    except TimeoutError:
        future.cancel()
        raise DeadlineExceeded(f"{what} in time") from None
