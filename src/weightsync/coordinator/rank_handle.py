"""Bounded calls on ranks. Each call ends with an answer, at its deadline, or with the loss of the rank."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from weightsync.config import Secret
from weightsync.coordinator.ranks import EngineRank, RankNode, TrainerRank, check_answer, known_as
from weightsync.coordinator.status import RankStatus
from weightsync.deadline import Deadline, within
from weightsync.errors import Aborted, DeadlineExceeded, PeerLost, ProtocolError, WeightSyncError, from_wire, to_wire
from weightsync.model.lora import adapter_label
from weightsync.protocol.lora_messages import DropLora
from weightsync.protocol.messages import Body, Done

T = TypeVar("T")
A = TypeVar("A", bound=Body)
R = TypeVar("R", TrainerRank, EngineRank)

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 0.25  # a rank's own deadline ends this much earlier, so that it can report what took so long
_DROP_SECONDS = 300.0  # for which a call to drop versions may wait in a rank

_abandoned: set[asyncio.Future[Any]] = set()


class RoundDeadline(Deadline):
    """A deadline on the event loop's clock, which tests may drive. One that was calculated may have passed already."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.at = seconds, self._now() + seconds

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _late(self, what: str) -> str:
        return f"no time is left for {what}: the {self.seconds:.3g} s of the round have passed"


class DropQueue:
    """Versions of adapters that one engine rank is to drop, by name: one call at a time, however many are retired at once.

    A rank's agent ends its connection if it gets too many calls at the same time. ``link`` is the rank's handle.
    """

    def __init__(self, link: RankHandle[Any]) -> None:
        self._link = link
        self._waiting: dict[str, tuple[set[int], asyncio.Future[None]]] = {}
        self._busy = False

    def put(self, name: str, numbers: Iterable[int]) -> asyncio.Future[None]:
        """Let the rank drop these versions. The future ends when it has, or could not. Nothing is withdrawn."""
        if name not in self._waiting:
            self._waiting[name] = set(), asyncio.get_running_loop().create_future()
        known, outcome = self._waiting[name]
        known.update(numbers)
        if not self._busy:
            self._next()
        return outcome

    def waiting(self, name: str) -> list[asyncio.Future[None]]:
        """Whatever has not been sent to the rank yet and drops versions of ``name``: a later call must not overtake it."""
        return [self._waiting[name][1]] if name in self._waiting else []

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            name = next(iter(self._waiting))
            numbers, outcome = self._waiting.pop(name)
            call = self._link.ask(DropLora(name, tuple(sorted(numbers))), Done, _DROP_SECONDS)
            self._link.start(call).add_done_callback(partial(self._ended, name, outcome))

    def _ended(self, name: str, outcome: asyncio.Future[None], asked: asyncio.Future[Done]) -> None:
        error = Aborted("the call was cancelled") if asked.cancelled() else asked.exception()
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
            outcome.exception()  # mark as retrieved: perhaps no caller waits for it
            _log.warning("%s did not drop versions of %s: %s", self._link.member, name, error)
        self._next()


class RankHandle(Generic[R]):
    """Handle of a connected rank. A rank that reconnects gets a new handle."""

    def __init__(self, node: RankNode[R], credential: str = "") -> None:
        self.node: RankNode[R] = node
        self.rank: R = node.rank
        """Self-description of the rank, with its newest layout."""
        self._credential = Secret(credential) if credential else None
        self.confirmed = False
        """Whether the rank is known to have received its Welcome."""
        self.gone: PeerLost | None = None
        self.serving = node.rank.hello.serving
        """Version that an engine rank is known to serve; ``None`` from the start of an update until its commit."""
        self.refuted = node.rank.hello.refuted
        """Why an engine rank's parameters are not those of the version that it served; empty if they may be."""
        self.prepared: str | None = None
        """Key of the plan for which an engine rank is ready."""
        self.transports: tuple[str, ...] = ()
        self.loras = {adapter_label(held.version.run, held.version.number): held for held in node.rank.hello.loras}
        """Versions of adapters that an engine rank is known to serve, by label."""
        self.drops = DropQueue(self)
        self.failing: tuple[str, float] | None = None
        """See :class:`~weightsync.coordinator.status.RankStatus`."""
        self.count = 0
        """For a trainer rank: the publication without a number after which its process started."""
        self._calls: dict[asyncio.Future[Any], asyncio.Future[Any]] = {}  # by outcome

    @property
    def member(self) -> str:
        """Name of the rank, unique among all ranks of the run."""
        return self.rank.member

    def status(self, ended: float | None = None) -> RankStatus:
        """Where the rank runs, for display."""
        hello = self.rank.hello
        return RankStatus(self.member, hello.rank, hello.host.name, hello.pid, ended, self.failing)

    @property
    def credential(self) -> str:
        """Secret that another connection must present to replace this one. The rank received it in its Welcome."""
        return "" if self._credential is None else self._credential.reveal()

    def gives_way_to(self, node: RankNode[R]) -> bool:
        """Whether ``node`` is a new connection of the same process, that is, whether it presents the credential.

        The session, a secret of that process, suffices as long as the Welcome with the credential may have been lost.
        """
        theirs, mine = node.rank.hello, self.rank.hello
        shown = hmac.compare_digest(theirs.credential, known_as(self.credential)) and bool(self.credential)
        return shown or (not self.confirmed and hmac.compare_digest(theirs.session, mine.session))

    async def ask(self, message: Body, answer: type[A], timeout: float) -> A:
        """Send ``message`` and return the rank's answer, which must be an ``answer``, within ``timeout`` seconds.

        Raises:
            ProtocolError: It is of another kind, or not of the size that ``message`` asks for.
            WeightSyncError: The rank could not do what ``message`` asks for.
        """
        answered = await self.node.call(message, timeout)
        if not isinstance(answered, answer):
            raise ProtocolError(f"{self.member} answered {type(message).__name__} with {type(answered).__name__}")
        check_answer(self.rank, message, answered)
        return answered

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run ``call`` on this rank. The future fails at once when the handle is severed; cancel it to withdraw the call."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.gone is not None:
            call.close()
            outcome.set_exception(self.gone)
            return outcome
        task = self._calls[outcome] = asyncio.ensure_future(call)

        def ended(done: asyncio.Future[T]) -> None:
            _abandoned.discard(task)
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
        task.add_done_callback(ended)
        outcome.add_done_callback(lambda done: (self._calls.pop(done, None), task.cancel()))
        return outcome

    def sever(self, reason: str) -> None:
        """Fail all running and later calls with :class:`~weightsync.errors.PeerLost`, because the connection is gone."""
        if self.gone is None:
            self.gone = PeerLost(f"{self.member} is gone: {reason}")
        for outcome, call in list(self._calls.items()):
            if not outcome.done() and not call.done():  # its answer came with the end and is about to be the outcome
                outcome.set_exception(self.gone)


def _named(member: str, error: BaseException) -> WeightSyncError:
    """Copy ``error`` with the rank's name in front of the message."""
    kind, message = to_wire(error)
    return from_wire(kind, message if member in message else f"{member}: {message}")


async def on_all(
    what: str,
    deadline: RoundDeadline,
    links: Mapping[str, RankHandle[R]],
    message: Body | Mapping[str, Body],
    answer: type[A],
) -> dict[str, A]:
    """Ask all links concurrently, each the same ``message`` or the one of its member, and return the answers by member.

    The first failure withdraws the other calls and is raised with the rank's name in front. A rank that ignores cancellation is not
    waited for.

    Raises:
        DeadlineExceeded: ``deadline`` passed. The message names the ranks that did not answer.
        PeerLost: A rank's connection is gone.
    """
    left = deadline.remaining(what)
    timeout = left - min(_ANSWER_SECONDS, left / 10)
    messages = message if isinstance(message, Mapping) else dict.fromkeys(links, message)
    outcomes = {member: link.start(link.ask(messages[member], answer, timeout)) for member, link in links.items()}
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
    left = deadline.left
    async with within(left, lambda: f"{what} did not finish within {left:.3g} s"):
        return await awaitable


async def drop(engines: Mapping[str, RankHandle[Any]], name: str, numbers: Collection[int], seconds: float) -> list[str]:
    """Let every rank drop these versions. Returns the errors of those that have not within ``seconds``.

    The call is not withdrawn then: a rank that is stopped or busy drops them later, and one that reconnects says what it has.
    """
    asked = {member: link.drops.put(name, numbers) for member, link in engines.items()}
    if asked:
        await asyncio.wait(asked.values(), timeout=seconds)
    errors: list[str] = []
    for member, outcome in asked.items():
        error = outcome.exception() if outcome.done() else DeadlineExceeded(f"no answer within {seconds:g} s")
        if error is not None:
            errors.append(f"{member} did not drop versions of {name}: {error}")
    return errors


def ranks_of(links: Mapping[str, RankHandle[R]]) -> dict[str, R]:
    """The ranks themselves, by member."""
    return {member: link.rank for member, link in links.items()}
