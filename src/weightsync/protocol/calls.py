"""Requests and answers in both directions over any ordered frame channel, such as a WebSocket or two queues in a test."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from weightsync import spans
from weightsync.deadline import within
from weightsync.errors import Aborted, DeadlineExceeded, PeerLost, ProtocolError, WeightSyncError, from_wire, to_wire
from weightsync.protocol.messages import Answer, Body, Call, Cancel, Failure, Frame, Notice, Progress, Timing

AnswerWatcher = Callable[[Body, Answer | Failure, float, tuple[spans.Span, ...]], None]
"""Called for each request that was handled, with its answer, the seconds that it took, and the spans."""

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.25  # extra time for the other side's own timeout error, which says more than "not answered"
_SEND_SECONDS = 30.0  # for frames without a waiting caller: answers and cancellations
_MOST_HANDLERS = 64  # concurrent calls; no agent of this package sends more
_NOTICE_CHARS = 4000
_MOST_SECONDS = 7 * 86400.0


@dataclass(eq=False)
class Calls:
    """Calls of one connection.

    ``send`` puts a frame on the wire and raises if it cannot. ``handle(body, timeout)`` answers requests of the other side and may
    raise. The owner of the wire passes every received frame to :meth:`feed` and calls :meth:`close` when the connection ends. Only
    :meth:`call` waits.

    ``peer`` names the other side in traces. ``on_answer`` is called for each request that was handled.
    """

    send: Callable[[Frame], Awaitable[None]]
    handle: Callable[[Body, float], Awaitable[Body]]
    on_progress: Callable[[int], None] | None = None
    on_notice: Callable[[str], None] | None = None
    peer: str = ""
    on_answer: AnswerWatcher | None = None

    def __post_init__(self) -> None:
        """No call is under way."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Body], asyncio.Task[Any] | None]] = {}
        """Answers that are awaited, each with the task that awaits it."""
        self._followed: dict[int, tuple[spans.Tracer, float]] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._posts: set[asyncio.Task[None]] = set()
        self._closed: WeightSyncError | None = None

    async def call(self, body: Body, timeout: float) -> Body:
        """Send ``body`` and return the other side's answer. A call that times out or is cancelled is withdrawn from the other side.

        A call takes at most a week, however large ``timeout`` is.

        Raises:
            DeadlineExceeded: No answer came within ``timeout`` seconds and a short margin.
            WeightSyncError: The other side's handler raised it, or it was passed to :meth:`close`.
        """
        if self._closed is not None:
            raise self._closed
        if not (math.isfinite(timeout) and timeout > 0):
            raise DeadlineExceeded(f"no time is left to call {type(body).__name__}")
        timeout = min(timeout, _MOST_SECONDS)  # more is refused by the other side
        number = next(self._ids)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, asyncio.current_task()
        tracer, sent = spans.tracer(), asyncio.get_running_loop().time()
        if tracer is not None:
            self._followed[number] = tracer, sent
        answered = False
        try:
            async with within(timeout + _ANSWER_SECONDS, lambda: f"{type(body).__name__} was not answered within {timeout:g} s"):
                await self._put(Call(number, timeout, body, "" if tracer is None else tracer.parent))
                result = await answer
            answered = True
            return result
        finally:
            del self._waiting[number]
            if tracer is not None and self._followed.pop(number, None) is not None:
                tracer.unanswered(self.peer, type(body).__name__, sent, asyncio.get_running_loop().time())
            answered = answered or (answer.done() and not answer.cancelled())
            if answer.done() and not answer.cancelled():
                answer.exception()  # mark as retrieved: the call may have ended otherwise
            if not answered and self._closed is None:
                self._post(Cancel(number))
            del answer  # the traceback of its error refers to this frame

    def feed(self, frame: Frame) -> None:
        """Process one frame from the wire.

        Raises:
            ProtocolError: The frame is not allowed after the handshake, or is out of bounds.
        """
        if self._closed is not None:
            return
        match frame:
            case Answer() | Failure():
                self._follow(frame)
                answer, _ = self._waiting.get(frame.id, (None, None))  # unknown: withdrawn while its answer was in flight
                if answer is None or answer.done():
                    return
                if isinstance(frame, Answer):
                    answer.set_result(frame.body)
                else:
                    answer.set_exception(from_wire(frame.kind, frame.message))
            case Call():
                self._begin(frame)
            case Cancel(id=number):
                handler = self._handlers.pop(number, None)
                if handler is not None:
                    handler.cancel()
                    self._keep(handler)
            case Progress(nbytes=nbytes):
                if self.on_progress is not None:
                    self.on_progress(nbytes)
            case Notice(text=text) if self.on_notice is not None:
                self.on_notice(text)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame is not allowed after the handshake")

    async def drained(self) -> None:
        """Wait until the answer of every request that has arrived is sent."""
        while running := [task for task in (*self._handlers.values(), *self._posts) if not task.done()]:
            await asyncio.wait(running)

    async def returned(self) -> None:
        """Wait until the task of every call whose answer has arrived has ended, and its done callbacks have run."""
        if tasks := [task for answer, task in self._waiting.values() if answer.done() and task is not None]:
            await asyncio.wait(tasks)

    def notify(self, text: str) -> None:
        """Send a :class:`~weightsync.protocol.messages.Notice` if the connection is open. Never waits."""
        self._post(Notice(text[:_NOTICE_CHARS]))

    def close(self, error: WeightSyncError | None = None) -> None:
        """End all calls: waiting and later calls raise ``error``, handlers are cancelled. Idempotent."""
        if self._closed is not None:
            return
        self._closed = error or PeerLost("the connection closed")
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._closed)
        for task in (*self._handlers.values(), *self._posts):
            task.cancel()
            self._keep(task)
        self._handlers.clear()

    def _follow(self, frame: Answer | Failure) -> None:
        """Tell the tracer of the call when it was handled, and what it took."""
        tracer, sent = self._followed.pop(frame.id, (None, 0.0))
        timing = frame.timing
        if tracer is not None and timing is not None:
            arrived = asyncio.get_running_loop().time()
            tracer.answered(self.peer, sent, timing.received, timing.answered, arrived, timing.spans)

    def _begin(self, call: Call) -> None:
        if call.id in self._handlers:
            raise ProtocolError(f"call {call.id} is already running")
        if len(self._handlers) >= _MOST_HANDLERS:
            raise ProtocolError(f"more than {_MOST_HANDLERS} concurrent calls")
        if not (math.isfinite(call.timeout) and 0 < call.timeout <= _MOST_SECONDS):
            raise ProtocolError(f"call {call.id} has an invalid timeout of {call.timeout!r} seconds")
        self._handlers[call.id] = asyncio.ensure_future(self._answer(call))

    async def _answer(self, call: Call) -> None:
        task = asyncio.current_task()
        scope = asyncio.timeout(call.timeout + _ANSWER_SECONDS / 2)  # the handler's own deadline comes first; its error says more
        frame: Answer | Failure
        received = spans.now()
        recorder = spans.SpanRecorder() if call.trace or self.on_answer is not None else None
        try:
            with spans.recording(recorder), spans.joining(call.trace):
                async with scope:
                    frame = Answer(call.id, await self.handle(call.body, call.timeout))
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise  # withdrawn or closed: no caller waits
            frame = Failure(call.id, *to_wire(Aborted(f"{type(call.body).__name__} was cancelled by the side that ran it")))
        except WeightSyncError as error:
            frame = Failure(call.id, *to_wire(error))
        except TimeoutError as error:
            late = DeadlineExceeded(f"{type(call.body).__name__} did not finish within {call.timeout:g} s")
            frame = Failure(call.id, *to_wire(late if scope.expired() else error))
        except Exception as error:  # noqa: BLE001 - sent to the caller, which raises it
            _log.exception("%s failed: unexpected error", type(call.body).__name__)
            frame = Failure(call.id, *to_wire(error))
        finally:
            if self._handlers.get(call.id) is task:
                del self._handlers[call.id]
        if recorder is not None:
            done = recorder.spans()
            if self.on_answer is not None:
                self.on_answer(call.body, frame, spans.now() - received, done)
            if call.trace:
                frame = msgspec.structs.replace(frame, timing=Timing(received, spans.now(), done))
        if task is not None and self._closed is None:
            self._keep(task)  # from here on only close() can cancel it
            await self._deliver(frame)

    async def _put(self, frame: Frame) -> None:
        try:
            await self.send(frame)
        except WeightSyncError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot encode {type(frame).__name__}: {error}") from error
        except Exception as error:  # whatever a closed wire raises
            raise PeerLost(f"cannot send {type(frame).__name__}: {error}") from error

    def _post(self, frame: Frame) -> None:
        """Send a frame without waiting."""
        if self._closed is None:
            self._keep(asyncio.ensure_future(self._deliver(frame)))

    async def _deliver(self, frame: Frame) -> None:
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await self._put(frame)
        except (WeightSyncError, TimeoutError) as error:
            _log.debug("frame not sent: %s", error)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
