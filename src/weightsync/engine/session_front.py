"""Base of the two drivers of an engine rank, rounds and updates from outside: calls become steps of its session, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.session import EngineSession, Ticket
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Audit, Body, Commit, Done, Quarantine, Resume
from weightsync.protocol.worker import IncomingCall


class SessionFront:
    """Answers calls for one engine rank, as steps of its session. A subclass adds the messages that it understands.

    ``reset_graphs`` is called when loading is finished, before caches are dropped.
    """

    turn_seconds = 5.0
    """Seconds after which a call that still waits for its turn is refused."""
    _points = "engine"
    """Prefix of the names of failpoints."""

    def __init__(self, session: EngineSession, reset_graphs: Callable[[], None] = lambda: None) -> None:
        self.session, self._reset_graphs = session, reset_graphs
        self._handlers: dict[type, Callable[[Any, Deadline], Body | None]] = {Commit: self._commit, Resume: self._resume}
        """Called in a turn of the session. ``None`` is answered as :class:`Done`."""
        self._at_once: dict[type, Callable[[Any, Ticket, Deadline], Body | None]] = {
            Quarantine: lambda body, ticket, deadline: self.session.quarantine(ticket, deadline)
        }
        """Called at once, perhaps beside a turn on another thread."""

    def receive(self, body: Body, update: int = 0) -> IncomingCall:
        """Take note of a call when it arrives, before it waits for its turn. Never blocks. A :class:`Quarantine` aborts here."""
        aborts = isinstance(body, Quarantine)
        reason = (body.reason or "the round failed") if isinstance(body, Quarantine) else ""
        ticket = self.session.receive(type(body).__name__, update, aborts=aborts, reason=reason, yields=isinstance(body, Audit))
        return IncomingCall(body, partial(self._run, body, ticket), partial(self._given_up, ticket, aborts), self.turn_seconds)

    def answer(self, body: Body, timeout: float, update: int = 0) -> Body:
        """Answer a call that arrives now."""
        return self.receive(body, update).run(timeout)

    def _run(self, body: Body, ticket: Ticket, timeout: float) -> Body:
        """Run a call that was received. Raises :class:`~weightsync.errors.Aborted` if it was aborted since it arrived."""
        deadline = Deadline(timeout)
        failpoints.reached(f"{self._points}.received.{type(body).__name__.lower()}")
        at_once = self._at_once.get(type(body))
        if at_once is not None:
            return at_once(body, ticket, deadline) or Done()
        with self.session.turn(ticket, deadline):
            self.session.check_abort()
            return self._answer(body, deadline)

    def _answer(self, body: Body, deadline: Deadline) -> Body:
        handler = self._handlers.get(type(body))
        if handler is None:
            raise ProtocolError(f"an engine rank does not understand {type(body).__name__}")
        return handler(body, deadline) or Done()

    def _given_up(self, ticket: Ticket, quarantines: bool) -> str:
        """The caller has given up: withdraw the call, unless it is a quarantine. Returns what the rank is doing."""
        if not quarantines:
            self.session.withdraw(ticket)
        return self.session.occupation

    def _commit(self, body: Commit, deadline: Deadline) -> None:
        self.session.require("written")
        failpoints.reached(f"{self._points}.finish")
        self.session.finish(body.version)
        self._reset_graphs()
        failpoints.reached(f"{self._points}.flush")
        self.session.commit(body.version)
        failpoints.reached(f"{self._points}.committed")

    def _resume(self, body: Resume, deadline: Deadline) -> None:
        self.session.require("committed")
        failpoints.reached(f"{self._points}.resume")
        with self.session.resuming(deadline):
            failpoints.reached(f"{self._points}.resumed")
