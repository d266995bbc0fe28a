"""Bounded calls on ranks. Each call ends with an answer, at its deadline, or with the loss of the rank."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from weightsync.coordinator.ranks import EngineNode, TrainerNode
from weightsync.errors import DeadlineExceeded, PeerLost, WeightSyncError, from_wire, to_wire
from weightsync.model import Version

__all__ = ["RankHandle", "RoundDeadline", "bounded", "in_thread", "on_all"]

T = TypeVar("T")
N = TypeVar("N", TrainerNode, EngineNode)

_ANSWER_SECONDS = 0.25  # a rank's own deadline ends this much earlier, so that it can report what took so long

_abandoned: set[asyncio.Future[Any]] = set()


class RoundDeadline:
    """A deadline on the event loop's clock, which tests may drive: ``seconds`` from now, or at the absolute time ``at``."""

    def __init__(self, seconds: float, at: float | None = None) -> None:
        self.seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds if at is None else at

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.at <= asyncio.get_running_loop().time()

    def remaining(self, what: str) -> float:
        """Return the seconds left, which are above zero.

        Args:
            what: The work that needs the time, for the error message.

        Raises:
            DeadlineExceeded: The deadline has passed.
        """
        left = self.at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(f"no time is left for {what}: the {self.seconds:.3g} s of the round have passed")
        return left


class RankHandle(Generic[N]):
    """Handle of a connected rank. A rank that reconnects gets a new handle."""

    def __init__(self, node: N, credential: str = "") -> None:
        self.node: N = node
        self.credential = credential
        """Secret that another connection must present to replace this one. The rank received it in its Welcome."""
        self.confirmed = False
        """Whether the rank is known to have received its Welcome."""
        self.gone: PeerLost | None = None
        self.serving: Version | None = getattr(node.rank, "serving", None)
        """Version that an engine rank is known to serve; ``None`` from the start of an update until its commit."""
        self.prepared: str | None = None
        """Key of the plan for which an engine rank is ready."""
        self.transports: tuple[str, ...] = ()
        self._outcomes: set[asyncio.Future[Any]] = set()

    @property
    def member(self) -> str:
        """Name of the rank, unique among all ranks of the run."""
        member: str = self.node.rank.member
        return member

    def gives_way_to(self, node: N) -> bool:
        """Whether ``node`` is a new connection of the same process, that is, whether it presents the credential.

        The session, a secret of that process, suffices as long as the Welcome with the credential may have been lost.
        """
        theirs, mine = node.rank, self.node.rank
        shown = hmac.compare_digest(theirs.credential.encode(), self.credential.encode()) and bool(self.credential)
        return shown or (not self.confirmed and hmac.compare_digest(theirs.session.encode(), mine.session.encode()))

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run ``call`` on this rank. The future fails at once when the handle is severed; cancel it to withdraw the call."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(self._outcomes.discard)
        if self.gone is not None:
            call.close()
            outcome.set_exception(self.gone)
            return outcome
        self._outcomes.add(outcome)
        task = asyncio.ensure_future(call)

        def ended(done: asyncio.Future[T]) -> None:
            error = None if done.cancelled() else done.exception()
            if outcome.done():
                return
            if done.cancelled():
                outcome.cancel()
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(done.result())

        # The task may outlive its outcome if the rank ignores cancellation: keep a reference, and retrieve its exception.
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)
        task.add_done_callback(ended)
        outcome.add_done_callback(lambda _: task.cancel())
        return outcome

    def sever(self, reason: str) -> None:
        """Fail all running and later calls with :class:`~weightsync.errors.PeerLost`, because the connection is gone."""
        if self.gone is None:
            self.gone = PeerLost(f"{self.member} is gone: {reason}")
        for outcome in list(self._outcomes):
            if not outcome.done():
                outcome.set_exception(self.gone)


def _named(member: str, error: BaseException) -> WeightSyncError:
    """Copy ``error`` with the rank's name in front of the message."""
    kind, message = to_wire(error)
    return from_wire(kind, message if member in message else f"{member}: {message}")


async def on_all(
    what: str,
    deadline: RoundDeadline,
    links: Mapping[str, RankHandle[N]],
    call: Callable[[RankHandle[N], float], Coroutine[Any, Any, T]],
) -> dict[str, T]:
    """Run ``call(link, seconds)`` on all links concurrently and return the answers by member.

    The first failure withdraws the other calls and is raised with the rank's name in front. A rank that ignores cancellation is not
    waited for.

    Raises:
        DeadlineExceeded: ``deadline`` passed. The message names the ranks that did not answer.
        PeerLost: A rank's connection is gone.
    """
    left = deadline.remaining(what)
    timeout = left - min(_ANSWER_SECONDS, left / 10)
    outcomes = {member: link.start(call(link, timeout)) for member, link in links.items()}
    try:
        if outcomes:
            await asyncio.wait(outcomes.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        for member, outcome in outcomes.items():
            if outcome.done() and outcome.cancelled():
                raise PeerLost(f"{member} cancelled its call: {what}")
            if outcome.done() and (error := outcome.exception()) is not None:
                raise _named(member, error) from error
        late = [member for member, outcome in outcomes.items() if not outcome.done()]
        if late:
            raise DeadlineExceeded(f"{what}: no answer from {', '.join(late)} within {left:.3g} s")
        return {member: outcome.result() for member, outcome in outcomes.items()}
    finally:
        for outcome in outcomes.values():
            if not outcome.cancel() and not outcome.cancelled():
                outcome.exception()  # mark as retrieved, so that asyncio does not report a second failure


async def in_thread(what: str, deadline: RoundDeadline, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread, so that minutes of planning do not block the connections.

    Raises:
        DeadlineExceeded: ``deadline`` passed. The thread itself runs on.
    """
    deadline.remaining(what)
    return await bounded(what, deadline, asyncio.get_running_loop().run_in_executor(None, work))


async def bounded(what: str, deadline: RoundDeadline, awaitable: Awaitable[T]) -> T:
    """Wait for ``awaitable`` until ``deadline``, then cancel it.

    Raises:
        DeadlineExceeded: ``deadline`` passed.
    """
    scope = asyncio.timeout_at(deadline.at)
    started = asyncio.get_running_loop().time()
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            waited = asyncio.get_running_loop().time() - started
            raise DeadlineExceeded(f"{what} did not finish within {waited:.3g} s") from None
        raise
