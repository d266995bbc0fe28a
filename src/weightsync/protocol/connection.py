"""An agent's connection to the coordinator, which reconnects whenever it breaks.

The process's :mod:`~weightsync.protocol.event_loop` holds the sockets; the agent's own code stays synchronous. Calls of the
coordinator run one at a time on a thread of this link. A :class:`~weightsync.protocol.messages.Quarantine` gets through on another,
because it must reach an engine that is in the middle of a move.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import wait
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from weightsync import errors
from weightsync.closing import Closeable, OnFailure
from weightsync.config import ClientSettings, Secret
from weightsync.deadline import Deadline, within
from weightsync.errors import Aborted, CoordinatorUnreachable, DeadlineExceeded, PeerLost, ProtocolError, WeightSyncError
from weightsync.forks import Origin
from weightsync.outcome import Latch, Outcome
from weightsync.protocol.calls import AnswerWatcher, Calls
from weightsync.protocol.dial import dial, hang_up
from weightsync.protocol.endpoint import unreachable
from weightsync.protocol.event_loop import shared_loop
from weightsync.protocol.messages import Body, Confirmed, Frame, Hello, Progress, Quarantine, Welcome, decode, encode
from weightsync.protocol.notices import NOTICE_SECONDS, reminding, tell
from weightsync.protocol.worker import IncomingCall, Worker

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_STEADY_SECONDS = 5.0
_PROGRESS_SECONDS = 0.1
_LATE_SECONDS = 0.06  # after a call's own deadline, whose error says more
_LONGEST_SECONDS = 86400.0
_GRACE = 1.0
"""Seconds that a caller's thread waits longer than the call itself, so that the call's own error arrives first."""


class ConnectionLost(PeerLost):
    """This rank's own connection broke; another rank's death, which the coordinator reports, is a plain ``PeerLost``."""


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class _Asked(Outcome[Body]):
    """A call of another thread to the coordinator. On the loop's thread, but for :meth:`withdraw`."""

    def __init__(self, closed: str) -> None:
        super().__init__()
        self._closed, self._withdrawn = closed, False
        self._task: asyncio.Task[Body] | None = None

    def begin(self, asking: Callable[[], Coroutine[Any, Any, Body]]) -> None:
        self._task = asyncio.ensure_future(asking())
        self._task.add_done_callback(self._ended_with)
        if self._withdrawn or self.over.is_set:
            self._task.cancel()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.over.is_set:
            self.fail(Aborted(self._closed))

    def withdraw(self, loop: asyncio.AbstractEventLoop) -> None:
        self._withdrawn = True  # first: begin() looks at it when it has made the task
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(self.cancel)

    def _ended_with(self, task: asyncio.Task[Body]) -> None:
        if task.cancelled():
            self.fail(Aborted(self._closed))
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.give(task.result())
        self._task = None  # its error's traceback refers to this


class CoordinatorConnection(Closeable):
    """One rank's connection to the coordinator.

    ``hello`` is asked before every attempt, so that what the rank serves or published is current. ``receive`` is given each call of
    the coordinator when it arrives, and returns what runs it, which may block. ``on_welcome`` and ``on_lost`` tell of every
    connection made and lost. ``hello``, ``receive`` and the two callbacks run on the thread of all
    links: they must return at once and not call back into the link, but for :meth:`progress` and :meth:`report`. The order of calls
    is :meth:`connect` once, then anything, then :meth:`close`.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        hello: Callable[[], Hello],
        receive: Callable[[Body], IncomingCall],
        on_welcome: Callable[[Welcome], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        name: str = "agent",
    ) -> None:
        self._origin = Origin()
        self._settings, self._name = settings, name
        self._hello, self._on_welcome, self._on_lost = hello, on_welcome, on_lost
        self._receive = receive
        self.on_answer: AnswerWatcher | None = None
        """Called after every call of the coordinator that was answered, on the thread of all links."""
        self._calls_worker = Worker(f"weightsync-calls-{name}")
        self._quarantine_worker = Worker(f"weightsync-quarantine-{name}")
        self._beside_worker = Worker(f"weightsync-beside-{name}")
        self._borrowed: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Lock()
        self._ended = Latch()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._first = Outcome[Welcome]()
        self._asked: set[_Asked] = set()
        self._closed = False
        self._pauses = True
        """Whether there is a pause before the next connection."""
        # Only the loop's thread touches these.
        self._calls: Calls | None = None
        self._socket: ClientConnection | None = None
        self._refused_on: ClientConnection | None = None
        self._answering = 0
        self._returning: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._trouble = "not connected yet"
        self._lost_at: float | None = None
        self._credential: Secret | None = None
        self._joined_run = ""
        # Progress: the newest count, and whether it is to be reported.
        self._progress_bytes = 0
        self._progress_due = False
        self._progressed = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the coordinator has this rank now."""
        return self._connected.is_set()

    def connect(self) -> Welcome:
        """Connect within the settings' ``timeouts.connect`` and return the coordinator's welcome.

        An unreachable coordinator is tried again until then. Raises :class:`~weightsync.errors.CoordinatorUnreachable`,
        :class:`~weightsync.errors.AuthenticationError`, or the error that the coordinator refused this rank with; nothing is
        left running then.
        """
        if self._borrowed is not None or self._closed:
            raise errors.ConfigurationError("a link connects once; make a new one")
        self._borrowed = shared_loop.borrow()
        asyncio.run_coroutine_threadsafe(self._run(), self._borrowed)
        timeout = self._settings.timeouts.connect + 2 * _GRACE
        soon = min(NOTICE_SECONDS, timeout)
        with OnFailure(self.close):
            if not self._first.over.wait(soon):
                self._tell_waiting()
            if not self._first.over.wait(timeout - soon):
                raise CoordinatorUnreachable(unreachable(self._settings, "the connection did not come to stand in time"))
            return self._first.result()

    def call(self, body: Body, timeout: float) -> Body:
        """Ask the coordinator, from any thread but that of the links, and return its answer.

        Waits for a lost connection to come back, within ``timeout`` seconds in all. A call that was already sent when the
        connection broke is not repeated: it raises :class:`~weightsync.errors.PeerLost` at once. Raises what the coordinator
        answered, :class:`~weightsync.errors.DeadlineExceeded`, or :class:`~weightsync.errors.Aborted` after :meth:`close`.
        """
        self._origin.require(f"the link of {self._name}")
        loop = self._loop
        if self._closed or loop is None or _runs_here(loop):
            raise Aborted(f"the link of {self._name} is closed, not connected, or was called from the links' own thread")
        deadline = Deadline(timeout)
        closed = f"the link of {self._name} was closed while it waited for {type(body).__name__}"
        asked = _Asked(closed)
        self._asked.add(asked)
        try:
            try:
                loop.call_soon_threadsafe(asked.begin, lambda: self._ask(body, deadline))
            except RuntimeError:
                if not loop.is_closed():
                    raise  # of a signal handler
            if self._loop is None:  # it ended just now, and may never look at what it was given
                raise Aborted(closed)
            if not asked.over.wait(timeout + _GRACE):
                raise DeadlineExceeded(f"the coordinator did not answer {type(body).__name__} within {timeout:g} s")
            return asked.result()
        finally:
            if not asked.over.is_set:
                asked.withdraw(loop)  # Ctrl-C, too
            self._asked.discard(asked)
            del asked  # its error's traceback refers to this frame

    def report(self, body: Body, timeout: float) -> None:
        """As :meth:`call`, without waiting. What does not arrive within ``timeout`` seconds is lost. Never blocks."""
        loop, asked = self._loop, _Asked("its link was closed")

        async def ask() -> Body:
            try:
                return await self._ask(body, Deadline(timeout))
            finally:
                self._asked.discard(asked)

        if loop is not None and not self._closed and not self._origin.elsewhere:
            self._asked.add(asked)
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(asked.begin, ask)

    def progress(self, nbytes: int) -> None:
        """Report that this many bytes of the running move are in place. Any thread; never blocks; sent a few times a second."""
        self._progress_bytes = nbytes
        loop = self._loop
        if self._progress_due or self._closed or loop is None or self._origin.elsewhere:
            return
        self._progress_due = True
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(self._progressed.set)

    def connect_again(self) -> None:
        """Connect again, so that the coordinator gets this rank's Hello as it is now. Calls wait for that. Never blocks."""
        loop, self._pauses = self._loop, False
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                asyncio.run_coroutine_threadsafe(self._restart(), loop)

    async def _restart(self) -> None:
        self._connected.clear()
        if self._socket is not None:  # a normal closure would say that it leaves
            await self._socket.close(CloseCode.SERVICE_RESTART, "this rank answers again")

    def drain(self, timeout: float) -> None:
        """Wait until each call of the coordinator is answered, up to ``timeout`` seconds. Not on the thread of all links."""
        loop, calls = self._loop, self._calls
        if loop is None or calls is None or self._origin.elsewhere:
            return
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            draining = asyncio.run_coroutine_threadsafe(calls.drained(), loop)
            wait([draining], timeout)
            draining.cancel()

    def close(self, timeout: float = 5.0) -> None:
        """Leave the coordinator and end this link's threads. Safe twice and from any thread.

        A call that still runs is waited for up to ``timeout`` seconds: abort it first. In a forked child: nothing.
        """
        if self._origin.elsewhere:
            return
        self._closed = True
        loop, main = self._loop, self._main
        if loop is not None and main is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(main.cancel)
        end = Deadline(timeout)
        with self._closing:
            borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            ended = _runs_here(borrowed) or self._ended.wait(timeout)
            if not shared_loop.give_back(max(0.05, end.left)) or not ended:
                _log.warning("%s: the link did not end within %g s", self._name, timeout)
        for worker in (self._calls_worker, self._quarantine_worker, self._beside_worker):
            if not worker.close(max(0.05, end.left)):
                _log.warning("%s: a call is still running after the link was closed", self._name)

    # From here on: the thread of all links.

    async def _run(self) -> None:
        try:
            await self._stay()
        except asyncio.CancelledError:
            pass  # close()
        except Exception as error:  # noqa: BLE001 - connect() raises it, or it is logged
            if self._first.over.is_set:
                _log.exception("%s: the link to the coordinator failed for good", self._name)
            else:
                self._first.fail(error)
        finally:
            self._loop = None
            for asked in list(self._asked):
                asked.cancel()
            if not self._first.over.is_set:
                self._first.fail(Aborted(f"the link of {self._name} was closed while it connected"))
            if self._returning is not None:
                self._returning.cancel()
            self._ended.set()

    async def _stay(self) -> None:
        """Connect, serve, reconnect, until cancelled. Errors end it only before the first welcome."""
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self._closed:
            return
        first = Deadline(self._settings.timeouts.connect)
        pause = _FIRST_PAUSE
        while True:
            welcomed = self._first.over.is_set
            timeout = self._settings.timeouts.connect if welcomed else first.remaining("connecting to the coordinator")
            try:
                shown = "" if self._credential is None else self._credential.reveal()
                hello = msgspec.structs.replace(self._hello(), credential=shown)
                socket, welcome = await dial(self._settings, hello, timeout)
                await self._look_for_refusal(socket, welcome)
            except CoordinatorUnreachable as error:
                if not welcomed and first.left <= pause:
                    raise
                self._note(str(error))
            except WeightSyncError as error:
                if not welcomed:
                    raise
                self._note(f"{type(error).__name__}: {error}")
            else:
                since = time.monotonic()
                await self._serve(socket, welcome)
                if time.monotonic() - since > _STEADY_SECONDS:  # else a coordinator that accepts and drops agents would be flooded
                    pause = _FIRST_PAUSE
            if not self._pauses:
                self._pauses = True
                continue
            # Full jitter above a floor: a thousand agents must not come back in the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._settings.timeouts.reconnect)

    async def _look_for_refusal(self, socket: ClientConnection, welcome: Welcome) -> None:
        """Rounds leave this rank out: an error for one that joins first; one that was here before stays, and says so."""
        if not welcome.refusal:
            return
        if self._first.over.is_set:
            self._tell(f"rounds leave this rank out: {welcome.refusal}")
            return
        await hang_up(socket, CloseCode.NORMAL_CLOSURE, "its process closed it")
        raise errors.from_wire(*welcome.refusal.split(": ", 1))

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:  # once, not at every attempt
            _log.warning("%s: %s", self._name, trouble)
        self._trouble = trouble

    async def _serve(self, socket: ClientConnection, welcome: Welcome) -> None:
        async def send(frame: Frame) -> None:
            try:
                await socket.send(encode(frame))
            except ConnectionClosed as error:
                raise ConnectionLost(f"the coordinator at {self._settings.coordinator} is gone: {error}") from None

        calls = Calls(send, self._dispatch, on_notice=self._tell, on_answer=self.on_answer)
        reporting = asyncio.ensure_future(self._report_progress(send))
        reason = "the link was closed"
        try:
            self._calls, self._socket, self._trouble = calls, socket, ""
            self._credential = Secret(welcome.credential) if welcome.credential else None
            self._connected.set()
            if self._on_welcome is not None:
                self._on_welcome(welcome)
            self._greeted(welcome)
            if not self._first.over.is_set:
                self._first.give(welcome)
            with contextlib.suppress(ConnectionLost):  # read() says why
                await send(Confirmed())
            reason = await self._read(socket, calls)
        finally:
            self._connected.clear()
            self._calls = self._socket = None
            reporting.cancel()
            lost = f"the connection to the coordinator at {self._settings.coordinator} ended: {reason}"
            calls.close(ConnectionLost(lost))
            leaves = CloseCode.NORMAL_CLOSURE, "its process closed it"
            await hang_up(socket, *(leaves if self._closed else (CloseCode.INTERNAL_ERROR, "its link failed")))
        self._lost_at = time.monotonic()
        self._note(lost)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _greeted(self, welcome: Welcome) -> None:
        where = self._settings.coordinator
        if self._lost_at is None:
            _log.info("%s joined run %s at %s", welcome.member, welcome.run, where)
        else:
            away = time.monotonic() - self._lost_at
            changed = "" if welcome.run == self._joined_run else f"; its run is {welcome.run} now, and was {self._joined_run}"
            _log.info("%s is connected to %s again after %.1f s%s", welcome.member, where, away, changed)
        self._joined_run = welcome.run

    async def _read(self, socket: ClientConnection, calls: Calls) -> str:
        """Feed frames to ``calls`` until the connection ends, and say why it did."""
        try:
            while True:
                data = await socket.recv()
                if not isinstance(data, bytes):
                    raise ProtocolError("a text frame from the coordinator")
                calls.feed(decode(data))
        except ProtocolError as error:
            await hang_up(socket, CloseCode.PROTOCOL_ERROR, str(error)[:100])
            return str(error)
        except ConnectionClosed as error:
            return errors.readable(error.rcvd.reason) if error.rcvd and error.rcvd.reason else str(error)

    async def _dispatch(self, body: Body, timeout: float) -> Body:
        call, what = self._receive(body), type(body).__name__
        beside = self._beside_worker if call.beside else self._calls_worker
        worker = self._quarantine_worker if isinstance(body, Quarantine) else beside
        job = worker.submit(call.run, what, timeout)
        outcome = asyncio.wrap_future(job)
        counted = worker is self._calls_worker
        self._answering += counted
        try:
            await asyncio.wait([outcome], timeout=min(call.turn_seconds, timeout + _LATE_SECONDS))
            if not outcome.done() and not job.running():  # the call before it hangs, and was given up by the coordinator
                if not (call.beside or call.yields):
                    self._connect_again_after(worker)
                waited = min(call.turn_seconds, timeout)
                raise DeadlineExceeded(f"{what} did not get its turn within {waited:.3g} s: {call.withdraw()}")
            if not outcome.done():
                await asyncio.wait([outcome], timeout=max(0.0, timeout + _LATE_SECONDS - call.turn_seconds))
            if not outcome.done():
                raise DeadlineExceeded(f"{what} did not finish within {timeout:.3g} s: {call.withdraw()}")
            answer = outcome.result()
        except asyncio.CancelledError:
            call.withdraw()
            raise
        finally:
            self._answering -= counted
            if not outcome.cancel() and not outcome.cancelled():
                outcome.exception()  # looked at, should the call have been withdrawn in the same moment
            del job, outcome  # their error refers to this frame, and through its traceback to what it was about: mappings, sockets
        if answer is None:
            raise ProtocolError(f"{what} was not answered")
        return answer

    def _connect_again_after(self, worker: Worker) -> None:
        """A call was refused: when what hangs has ended, say Hello again, so that the coordinator admits this rank again."""
        self._refused_on = self._socket
        if not self._ended.is_set and (self._returning is None or self._returning.done()):
            self._returning = asyncio.ensure_future(self._connect_again(worker))

    async def _connect_again(self, worker: Worker) -> None:
        with contextlib.suppress(DeadlineExceeded):
            for busy in (worker, self._quarantine_worker):  # a quarantine ends first: a Hello must not be overtaken by it
                await asyncio.wrap_future(busy.submit(lambda _: None, "next", _LONGEST_SECONDS))
            socket = self._socket
            # Not if another connection was made since the last refusal, or if the coordinator calls again already.
            if socket is not None and socket is self._refused_on and not self._answering:
                await self._restart()

    async def _ask(self, body: Body, deadline: Deadline) -> Body:
        what = f"{type(body).__name__} to the coordinator at {self._settings.coordinator}"
        left = deadline.remaining(what)
        async with within(left, lambda: f"{what} was not sent within {deadline.seconds:g} s: {self._trouble}"):
            with reminding(self._tell_waiting):
                await self._connected.wait()
        if self._calls is None:
            raise ConnectionLost(f"{what} was not sent: {self._trouble}")
        return await self._calls.call(body, deadline.remaining(what))

    def _tell(self, text: str) -> None:
        tell(_log, f"{self._name}: {text}")

    def _tell_waiting(self) -> None:
        self._tell(f"waiting for the coordinator at {self._settings.coordinator} ({self._trouble})")

    async def _report_progress(self, send: Callable[[Frame], Awaitable[None]]) -> None:
        """Send the newest count whenever there is one, but not what came before this connection.

        The next report may start only after the last, so a slow socket gets fewer of them.
        """
        self._progressed.clear()
        self._progress_due = False
        while True:
            await self._progressed.wait()
            self._progressed.clear()
            self._progress_due = False  # before the count is read: one that comes from now on is reported again
            try:
                async with asyncio.timeout(self._settings.timeouts.heartbeat):
                    await send(Progress(self._progress_bytes))
            except (PeerLost, TimeoutError) as error:
                _log.debug("%s: progress was not reported: %s", self._name, error)
            await asyncio.sleep(_PROGRESS_SECONDS)
