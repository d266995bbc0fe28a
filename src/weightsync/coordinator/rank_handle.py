"""Bounded calls on ranks: each ends with an answer, the deadline, or the rank's loss, however the rank behaves."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from weightsync.coordinator.ranks import EngineNode, TrainerNode
from weightsync.errors import DeadlineExceeded, PeerLost, WeightSyncError, from_wire, to_wire
from weightsync.model import Version

__all__ = ["Limit", "Link", "bounded", "in_thread", "on_all"]

T = TypeVar("T")
N = TypeVar("N", TrainerNode, EngineNode)

_ANSWER_SECONDS = 0.25  # sooner than the round gives up, a rank says by itself what took it so long

_abandoned: set[asyncio.Future[Any]] = set()


class Limit:
    """A deadline on the event loop's clock, which tests may drive. ``seconds`` from now, or the absolute ``at``."""

    def __init__(self, seconds: float, at: float | None = None) -> None:
        self.seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds if at is None else at

    def remaining(self, what: str) -> float:
        """Seconds left, above zero. Raises :class:`~weightsync.errors.DeadlineExceeded` saying that ``what`` took too long."""
        left = self.at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(f"no time is left for {what}: the {self.seconds:.3g} s of the round are over")
        return left


class Link(Generic[N]):
    """A rank that has joined, until it leaves. A rank that comes back is a new link."""

    def __init__(self, node: N, credential: str = "") -> None:
        self.node: N = node
        self.credential = credential
        """What another connection must show to take this one's place. The rank has it from its Welcome."""
        self.confirmed = False
        """Whether the rank is known to have its Welcome."""
        self.gone: PeerLost | None = None
        self.serving: Version | None = getattr(node.rank, "serving", None)
        """What an engine rank holds whole and labelled, as far as anybody knows; ``None`` from the start of an update on."""
        self.prepared: str | None = None
        """Key of the plan that an engine rank is ready for."""
        self.transports: tuple[str, ...] = ()
        self._outcomes: set[asyncio.Future[Any]] = set()

    @property
    def member(self) -> str:
        """The rank's name among all ranks of the run."""
        member: str = self.node.rank.member
        return member

    def gives_way_to(self, node: N) -> bool:
        """Whether ``node`` is the same process, which connected again: it shows the credential.

        If the Welcome with the credential may have been lost, its session, which nobody else knows, is enough.
        """
        theirs, mine = node.rank, self.node.rank
        shown = hmac.compare_digest(theirs.credential.encode(), self.credential.encode()) and bool(self.credential)
        return shown or (not self.confirmed and hmac.compare_digest(theirs.session.encode(), mine.session.encode()))

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run ``call`` on this rank; the future fails at once when the link is severed. Cancel the future to withdraw it."""
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

        # The task may outlive its outcome (a rank that does not react to cancellation): kept, and its end is looked at.
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)
        task.add_done_callback(ended)
        outcome.add_done_callback(lambda _: task.cancel())
        return outcome

    def sever(self, reason: str) -> None:
        """The connection is gone: every running and later call raises :class:`~weightsync.errors.PeerLost`."""
        if self.gone is None:
            self.gone = PeerLost(f"{self.member} is gone: {reason}")
        for outcome in list(self._outcomes):
            if not outcome.done():
                outcome.set_exception(self.gone)


def _named(member: str, error: BaseException) -> WeightSyncError:
    """The same kind of error, with the rank's name in front."""
    kind, message = to_wire(error)
    return from_wire(kind, message if member in message else f"{member}: {message}")


async def on_all(
    what: str, limit: Limit, links: Mapping[str, Link[N]], call: Callable[[Link[N], float], Coroutine[Any, Any, T]]
) -> dict[str, T]:
    """The answers of ``call(link, seconds)`` on all links at once, by member.

    The first failure withdraws the others' calls and is raised with the rank's name in front. Raises
    :class:`~weightsync.errors.DeadlineExceeded` naming the ranks that did not answer in time. A rank that ignores being
    cancelled is not waited for.
    """
    left = limit.remaining(what)
    told = left - min(_ANSWER_SECONDS, left / 10)
    outcomes = {member: link.start(call(link, told)) for member, link in links.items()}
    try:
        if outcomes:
            await asyncio.wait(outcomes.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        for member, outcome in outcomes.items():
            if outcome.done() and outcome.cancelled():
                raise PeerLost(f"{member} withdrew from {what}")
            if outcome.done() and (error := outcome.exception()) is not None:
                raise _named(member, error) from error
        late = [member for member, outcome in outcomes.items() if not outcome.done()]
        if late:
            raise DeadlineExceeded(f"{what}: no answer from {', '.join(late)} within {left:.3g} s")
        return {member: outcome.result() for member, outcome in outcomes.items()}
    finally:
        for outcome in outcomes.values():
            if not outcome.cancel() and not outcome.cancelled():
                outcome.exception()  # looked at, so that asyncio does not report a second failure as forgotten


async def in_thread(what: str, limit: Limit, work: Callable[[], T]) -> T:
    """``work()`` in a thread, so that a plan of minutes does not stop the connections. Raises ``DeadlineExceeded``."""
    limit.remaining(what)
    return await bounded(what, limit, asyncio.get_running_loop().run_in_executor(None, work))


async def bounded(what: str, limit: Limit, awaitable: Awaitable[T]) -> T:
    """What ``awaitable`` gives before the limit; it is cancelled there. Raises :class:`~weightsync.errors.DeadlineExceeded`."""
    scope = asyncio.timeout_at(limit.at)
    started = asyncio.get_running_loop().time()
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            waited = asyncio.get_running_loop().time() - started
            raise DeadlineExceeded(f"{what} did not finish within {waited:.3g} s") from None
        raise
