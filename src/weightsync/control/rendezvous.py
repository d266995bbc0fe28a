"""Where the trainer's ranks meet before a publication: all of them, with the same number, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weightsync.control.link import Limit
from weightsync.control.membership import Membership
from weightsync.control.shelves import Shelves
from weightsync.errors import Aborted, DeadlineExceeded, MembershipError, PeerLost, VersionError, WeightSyncError
from weightsync.messages import RoundResult

__all__ = ["Rendezvous"]


class _Gathering:
    """Ranks that want to publish one number, and what comes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: dict[str, Limit] = {}
        self.sessions: dict[str, str] = {}
        """The process behind each rank that asked."""
        self.answered: set[str] = set()
        """Ranks that have been given the result."""
        self.result: asyncio.Future[RoundResult] = asyncio.get_running_loop().create_future()

    def fail(self, error: WeightSyncError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # looked at: there may be nobody left to raise it for

    def follow(self, round_: asyncio.Task[RoundResult]) -> None:
        """The round has started: its outcome is the result."""

        def ended(done: asyncio.Task[RoundResult]) -> None:
            if done.cancelled():
                self.fail(Aborted(f"the publication of version {self.number} was cancelled"))
            elif (error := done.exception()) is not None:
                if not self.result.done():
                    self.result.set_exception(error)
                    self.result.exception()
            elif not self.result.done():
                self.result.set_result(done.result())

        round_.add_done_callback(ended)


class Rendezvous:
    """Gathers the trainer's ranks and calls ``start(number, limit)`` when all have asked for the same number."""

    def __init__(self, members: Membership, shelves: Shelves, start: Callable[[int, Limit], asyncio.Task[RoundResult]]) -> None:
        self._members = members
        self._shelves = shelves
        self._start = start
        self._gathering: _Gathering | None = None
        self._running: _Gathering | None = None

    async def publish(self, member: str, number: int, limit: Limit) -> RoundResult:
        """See :meth:`weightsync.control.coordinator.Coordinator.publish`."""
        gathering = self._interrupted(member, number)
        if gathering is None:
            gathering = self._enter(member, number, limit)
        if gathering is self._gathering and not self._members.missing_trainers(set(gathering.asked)):
            self._gathering, self._running = None, gathering
            gathering.follow(self._start(number, min(gathering.asked.values(), key=lambda asked: asked.at)))
        cancelled = True
        try:
            await asyncio.wait([gathering.result], timeout=limit.remaining(f"the publication of version {number}"))
            cancelled = False
        finally:
            if gathering is self._gathering and not gathering.result.done():
                self._give_up(gathering, member, cancelled)
        if not gathering.result.done():
            raise DeadlineExceeded(f"the round of version {number} still runs after {limit.seconds:g} s")
        gathering.answered.add(member)
        return gathering.result.result()

    def _interrupted(self, member: str, number: int) -> _Gathering | None:
        """The publication whose result this rank never got, since its connection broke: asking again is no second publication."""
        found, link = self._running, self._members.trainers.get(member)
        if found is None or link is None or found.number != number or member in found.answered:
            return None
        return found if found.sessions.get(member) == link.node.rank.session else None

    def _enter(self, member: str, number: int, limit: Limit) -> _Gathering:
        if member not in self._members.trainers:
            raise MembershipError(f"{member} is not a rank of the trainer, and cannot publish")
        running = self._running
        last = max(self._shelves.last, running.number if running is not None and not running.result.done() else -1)
        if number <= last:
            raise VersionError(f"{member} cannot publish version {number}: the last one is {last}, and numbers only go up")
        if self._gathering is None:
            self._gathering = _Gathering(number)
        gathering = self._gathering
        if gathering.number != number:
            others = ", ".join(gathering.asked)
            error = VersionError(f"trainer ranks differ: {member} publishes version {number}, {others} version {gathering.number}")
            self._gathering = None
            gathering.fail(error)
            raise error
        if member in gathering.asked:
            raise VersionError(f"{member} is publishing version {number} already")
        gathering.asked[member] = limit
        gathering.sessions[member] = self._members.trainers[member].node.rank.session
        return gathering

    def _give_up(self, gathering: _Gathering, member: str, cancelled: bool) -> None:
        """One rank stops waiting, by its deadline or because it was cancelled: the others would wait in vain."""
        absent = ", ".join(map(str, self._members.missing_trainers(set(gathering.asked))))
        why = (
            f"{member} stopped waiting before trainer rank {absent} came"
            if cancelled
            else f"trainer rank {absent} did not ask for it"
        )
        del gathering.asked[member]
        self._gathering = None
        gathering.fail(DeadlineExceeded(f"version {gathering.number} was not published: {why}"))

    def left(self, member: str, reason: str) -> None:
        """A rank is gone. If it is the trainer's, nobody can publish without it."""
        gathering = self._gathering
        if gathering is not None and member in gathering.asked:
            self._gathering = None
            gathering.fail(PeerLost(f"{member} is gone ({reason}) while version {gathering.number} was being published"))

    def close(self) -> None:
        """Nobody publishes any more."""
        if self._gathering is not None:
            self._gathering.fail(Aborted("the coordinator is closing"))
            self._gathering = None
