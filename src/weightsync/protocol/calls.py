"""Requests and answers, both ways, over anything that carries frames in order: a WebSocket, or two queues in a test."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable

from weightsync.errors import Aborted, DeadlineExceeded, PeerLost, ProtocolError, WeightSyncError, from_wire, to_wire
from weightsync.protocol.messages import Answer, Body, Call, Cancel, Failure, Frame, Notice, Progress

__all__ = ["Calls"]

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.25  # longer than the other side was given: its own error says more than "not answered"
_SEND_SECONDS = 30.0  # for frames that nobody waits for: answers and cancellations
_MOST_HANDLERS = 64  # a peer that asks for more at once is not one of ours
_NOTICE_CHARS = 4000
_MOST_SECONDS = 7 * 86400.0


class Calls:
    """One connection's calls.

    ``send`` puts a frame on the wire and raises if it cannot; ``handle(body, timeout)`` answers the other side's requests and
    may raise. Whoever reads the wire passes every frame to :meth:`feed`, and says :meth:`close` when it ends. No method but
    :meth:`call` waits.
    """

    def __init__(
        self,
        send: Callable[[Frame], Awaitable[None]],
        handle: Callable[[Body, float], Awaitable[Body]],
        on_progress: Callable[[int], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self._send = send
        self._handle = handle
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Body]] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._posts: set[asyncio.Task[None]] = set()
        self._closed: WeightSyncError | None = None

    async def call(self, body: Body, timeout: float) -> Body:
        """The other side's answer to ``body``.

        Raises what its handler raised (its own deadline's error, too), :class:`~weightsync.errors.DeadlineExceeded` a moment
        after ``timeout`` seconds if nothing came, or the error
        given to :meth:`close`. A call that times out or is cancelled is withdrawn from the other side.
        """
        if self._closed is not None:
            raise self._closed
        if not (math.isfinite(timeout) and timeout > 0):
            raise DeadlineExceeded(f"no time is left to call {type(body).__name__}")
        number = next(self._ids)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        scope = asyncio.timeout(timeout + _ANSWER_SECONDS)
        answered = False
        try:
            async with scope:
                await self._put(Call(number, timeout, body))
                result = await answer
            answered = True
            return result
        except TimeoutError:
            if scope.expired():
                raise DeadlineExceeded(f"{type(body).__name__} was not answered within {timeout:g} s") from None
            raise
        finally:
            del self._waiting[number]
            answered = answered or (answer.done() and not answer.cancelled())
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at, should the call have ended otherwise meanwhile
            if not answered and self._closed is None:
                self._post(Cancel(number))

    def feed(self, frame: Frame) -> None:
        """Take one frame from the wire. Raises :class:`~weightsync.errors.ProtocolError` for one that does not belong there."""
        if self._closed is not None:
            return
        match frame:
            case Answer(id=number, body=body):
                answer = self._waiting.get(number)  # unknown: it was withdrawn, and its answer was under way
                if answer is not None and not answer.done():
                    answer.set_result(body)
            case Failure(id=number, kind=kind, message=message):
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():
                    answer.set_exception(from_wire(kind, message))
            case Call():
                self._begin(frame)
            case Cancel(id=number):
                handler = self._handlers.pop(number, None)
                if handler is not None:
                    handler.cancel()
                    self._keep(handler)
            case Progress(nbytes=nbytes):
                if nbytes < 0:
                    raise ProtocolError(f"progress of {nbytes} bytes")
                if self._on_progress is not None:
                    self._on_progress(nbytes)
            case Notice(text=text) if self._on_notice is not None:
                self._on_notice(text)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame does not belong after the greeting")

    def notify(self, text: str) -> None:
        """Send a :class:`~weightsync.protocol.messages.Notice`, if the connection is there. Never waits."""
        self._post(Notice(text[:_NOTICE_CHARS]))

    def close(self, error: WeightSyncError | None = None) -> None:
        """The connection is over: every waiting and later call raises ``error``, every handler is cancelled. Safe twice."""
        if self._closed is not None:
            return
        self._closed = error or PeerLost("the connection closed")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._closed)
        for task in (*self._handlers.values(), *self._posts):
            task.cancel()
            self._keep(task)
        self._handlers.clear()

    def _begin(self, call: Call) -> None:
        if call.id in self._handlers:
            raise ProtocolError(f"call {call.id} is running already")
        if len(self._handlers) >= _MOST_HANDLERS:
            raise ProtocolError(f"more than {_MOST_HANDLERS} calls at once")
        if not (math.isfinite(call.timeout) and 0 < call.timeout <= _MOST_SECONDS):
            raise ProtocolError(f"call {call.id} wants an answer within {call.timeout!r} seconds")
        self._handlers[call.id] = asyncio.ensure_future(self._answer(call))

    async def _answer(self, call: Call) -> None:
        task = asyncio.current_task()
        scope = asyncio.timeout(call.timeout + _ANSWER_SECONDS / 2)  # the handler's own deadline comes first, and says more
        frame: Frame
        try:
            async with scope:
                frame = Answer(call.id, await self._handle(call.body, call.timeout))
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise  # withdrawn, or closed: nobody waits for an answer
            frame = Failure(call.id, *to_wire(Aborted(f"{type(call.body).__name__} was cancelled there")))
        except WeightSyncError as error:
            frame = Failure(call.id, *to_wire(error))
        except TimeoutError as error:
            late = DeadlineExceeded(f"{type(call.body).__name__} did not finish within {call.timeout:g} s")
            frame = Failure(call.id, *to_wire(late if scope.expired() else error))
        except Exception as error:  # noqa: BLE001 - crosses to the asker, who raises it
            _log.exception("%s failed by an unexpected error", type(call.body).__name__)
            frame = Failure(call.id, *to_wire(error))
        finally:
            if self._handlers.get(call.id) is task:
                del self._handlers[call.id]
        if task is not None and self._closed is None:
            self._keep(task)  # from here on it cannot be withdrawn, only closed
            await self._deliver(frame)

    async def _put(self, frame: Frame) -> None:
        try:
            await self._send(frame)
        except WeightSyncError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot encode {type(frame).__name__}: {error}") from error
        except Exception as error:  # whatever the wire raises when it is gone
            raise PeerLost(f"cannot send {type(frame).__name__}: {error}") from error

    def _post(self, frame: Frame) -> None:
        """Send something that nobody waits for."""
        if self._closed is None:
            self._keep(asyncio.ensure_future(self._deliver(frame)))

    async def _deliver(self, frame: Frame) -> None:
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await self._put(frame)
        except (WeightSyncError, TimeoutError) as error:
            _log.debug("a frame was not sent: %s", error)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
