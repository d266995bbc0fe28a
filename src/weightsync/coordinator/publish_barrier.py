"""Barrier of the trainer's ranks before a publication: all ranks publish the same number, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.coordinator.epochs import REMEDY, Epochs
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import TrainerNode
from weightsync.errors import Aborted, DeadlineExceeded, MembershipError, PeerLost, VersionError, WeightSyncError
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import reminding

__all__ = ["RETURN_SECONDS", "PublishBarrier"]

RETURN_SECONDS = 10.0
"""Seconds that a rank keeps its place in the barrier while its connection is broken."""

_LAST_NUMBER = (1 << 63) - 1


@dataclass
class _Arrival:
    """A rank that has asked to publish."""

    link: RankHandle[TrainerNode]
    deadline: RoundDeadline
    step: int | None = None
    call: int = 0
    """Identifies the call, so that a repeated call differs from the next call of the same process."""
    away: asyncio.TimerHandle | None = None
    """Timer that runs while the rank's connection is broken. When it fires, the other ranks stop waiting."""

    @property
    def session(self) -> str:
        return self.link.node.rank.session


class _Gathering:
    """Ranks that want to publish one number, and the outcome."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        """``None`` while every rank leaves the number to the coordinator."""
        self.epoch = 0
        """Set once all ranks have asked."""
        self.places: dict[str, _Arrival] = {}
        self.owed: dict[str, str] = {}
        """Ranks, with their sessions, that had not asked when the publication failed. They get the error when they ask."""
        self.result: asyncio.Future[RoundResult] = asyncio.get_running_loop().create_future()

    @property
    def what(self) -> str:
        """Description of the publication for messages."""
        return "the next version" if self.number is None else f"version {self.number}"

    def same(self, number: int | None) -> bool:
        """Whether a rank that asks for ``number`` may join this publication."""
        return number is None or self.number is None or number == self.number

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # mark as retrieved: perhaps no call is left to raise it

    def follow(self, round_: asyncio.Task[RoundResult]) -> None:
        """Copy the outcome of the round that has started to the result."""

        def ended(done: asyncio.Task[RoundResult]) -> None:
            if done.cancelled():
                self.fail(Aborted(f"the publication of {self.what} was cancelled"))
            elif (error := done.exception()) is not None:
                self.fail(error)
            elif not self.result.done():
                self.result.set_result(done.result())

        round_.add_done_callback(ended)


class PublishBarrier:
    """Barrier that calls ``start(epoch, number, deadline, step)`` once all trainer ranks have asked to publish the same number.

    A rank whose connection breaks keeps its place for :data:`RETURN_SECONDS`. It asks again when it has reconnected.
    """

    def __init__(
        self,
        members: Membership,
        publications: Publications,
        start: Callable[[int, int, RoundDeadline, int | None], asyncio.Task[RoundResult]],
        waiting_for: Callable[[], str] = lambda: "",
    ) -> None:
        self._members = members
        self._publications = publications
        self._start = start
        self._waiting_for = waiting_for
        self.epochs = Epochs(publications)
        self._gathering: _Gathering | None = None
        self._running: _Gathering | None = None
        self._failed: _Gathering | None = None

    async def publish(
        self, member: str, number: int | None, deadline: RoundDeadline, call: int = 0, step: int | None = None
    ) -> RoundResult:
        """See :meth:`weightsync.coordinator.coordinator.Coordinator.publish`."""
        link = self._members.trainers.get(member)
        if link is None:
            raise MembershipError(f"{member} is not a trainer rank and cannot publish")
        gathering = self._asked_before(link, call)
        if gathering is None:
            self._tell_failure(member, number)
            gathering = self._enter(member, number, _Arrival(link, deadline, step, call))
        if gathering is self._gathering and not self._absent(gathering):
            self._begin(gathering)
        cancelled = True
        try:
            with reminding(lambda: self._remind(gathering, link)):
                await asyncio.wait([gathering.result], timeout=deadline.remaining(f"the publication of {gathering.what}"))
            cancelled = False
        finally:
            if gathering is self._gathering and not gathering.result.done():
                self._stop_waiting(gathering, member, link, cancelled)
        if not gathering.result.done():
            raise DeadlineExceeded(f"the round of {gathering.what} is still running after {deadline.seconds:g} s")
        return gathering.result.result()

    def cannot_publish(self, member: str, number: int | None, reason: str) -> None:
        """Fail the publication for all ranks because ``member`` failed before it could ask."""
        gathering = self._gathering
        if gathering is None or not gathering.same(number):
            gathering = _Gathering(number)
        self._fail(gathering, Aborted(f"{gathering.what} was not published: {member} failed before it placed its shards: {reason}"))
        gathering.owed.pop(member, None)

    def left(self, member: str, reason: str, clean: bool = False) -> None:
        """Handle the end of a rank's connection.

        If the rank had asked, the others wait for it to return, unless it closed on purpose (``clean``).
        """
        gathering = self._gathering
        place = None if gathering is None else gathering.places.get(member)
        if gathering is None or place is None or self._members.trainers.get(member) is place.link:
            return
        if clean:
            self._fail(gathering, PeerLost(f"{member} is gone ({reason}) while {gathering.what} was being published"))
        else:
            self._keep_place(gathering, member, reason)

    def close(self) -> None:
        """Fail the pending publication."""
        if self._gathering is not None:
            self._fail(self._gathering, Aborted("the coordinator is closing"))

    # Entering.

    def _asked_before(self, link: RankHandle[TrainerNode], call: int) -> _Gathering | None:
        """Publication that this same call asked for before its connection broke, whether or not an answer was sent."""
        for gathering in (self._running, self._failed):
            place = None if gathering is None else gathering.places.get(link.member)
            if call and place is not None and (place.session, place.call) == (link.node.rank.session, call):
                return gathering
        return None

    def _tell_failure(self, member: str, number: int | None) -> None:
        failed = self._failed
        if failed is None or self._gathering is not None:
            return
        if failed.owed.pop(member, None) == self._members.trainers[member].node.rank.session and failed.same(number):
            failed.result.result()

    def _enter(self, member: str, number: int | None, place: _Arrival) -> _Gathering:
        gathering = self._gathering
        try:
            self._check_number(member, place.link, number)
        except VersionError as refusal:
            if gathering is not None and gathering.number == number:  # a replica reported it after the others had asked
                self._fail(gathering, refusal)
                gathering.owed.pop(member, None)
            raise
        if gathering is None:
            gathering = self._gathering = _Gathering(number)
        if not gathering.same(number):
            others = ", ".join(gathering.places)
            differ = VersionError(f"trainer ranks differ: {member} publishes version {number}, {others} version {gathering.number}")
            gathering.places.setdefault(member, place)
            self._fail(gathering, differ)
            raise differ
        held = gathering.places.get(member)
        if held is not None and held.link is place.link:
            raise VersionError(f"{member} is already publishing {gathering.what}")
        if held is not None and held.away is not None:
            held.away.cancel()
        if self._failed is not None:
            self._failed.owed.pop(member, None)  # it joins the others in this publication
        gathering.number = number if gathering.number is None else gathering.number
        gathering.places[member] = place
        return gathering

    def _check_number(self, member: str, link: RankHandle[TrainerNode], number: int | None) -> None:
        running, last = self._running, self.epochs.last(link.node.rank)
        same_epoch = running is not None and running.epoch == self.epochs.of(link.node.rank)
        if running is not None and same_epoch and not running.result.done() and running.number is not None:
            last = max(last, running.number)
        if number is not None and number <= last:
            raise VersionError(
                f"{member} cannot publish version {number}: the last one is {last}, and numbers only go up. {REMEDY}"
            )

    def _begin(self, gathering: _Gathering) -> None:
        """Start the round, now that all ranks have asked: decide its epoch and number."""
        self._gathering = None
        ranks = [place.link.node.rank for place in gathering.places.values()]
        try:
            gathering.epoch = self.epochs.decide(ranks)
            last = self._publications.last_in(gathering.epoch)
            if gathering.number is None:
                gathering.number = last + 1
            if not last < gathering.number <= _LAST_NUMBER:
                raise VersionError(f"version {gathering.number} cannot be published: the last one is {last}. {REMEDY}")
        except VersionError as error:
            self._fail(gathering, error)
            return
        self._running = gathering
        limit = min((place.deadline for place in gathering.places.values()), key=lambda limit: limit.at)
        step = next((place.step for place in gathering.places.values() if place.step is not None), None)
        gathering.follow(self._start(gathering.epoch, gathering.number, limit, step))

    # Waiting, and giving up.

    def _absent(self, gathering: _Gathering) -> str:
        """Trainer ranks that have not asked or are disconnected, for messages; empty if none is missing."""
        present = {member for member, place in gathering.places.items() if self._members.trainers.get(member) is place.link}
        connected = {link.node.rank.rank for link in self._members.trainers.values()}
        missing = self._members.missing_trainers(present)
        return ", ".join(str(rank) if rank in connected else f"{rank} (not connected)" for rank in missing)

    def _remind(self, gathering: _Gathering, link: RankHandle[TrainerNode]) -> None:
        if gathering is self._gathering:
            link.node.notify(f"waiting for trainer rank {self._absent(gathering)} to publish {gathering.what}")
        elif not gathering.result.done():
            link.node.notify(f"waiting for the round of {gathering.what}{self._waiting_for()}")

    def _stop_waiting(self, gathering: _Gathering, member: str, link: RankHandle[TrainerNode], cancelled: bool) -> None:
        """Handle the end of one rank's call: its deadline passed, it was cancelled, or its connection broke."""
        place = gathering.places.get(member)
        if place is None or place.link is not link:
            return  # it has reconnected and asked again
        if cancelled and self._members.trainers.get(member) is not link:
            self._keep_place(gathering, member, "its connection broke")
            return
        absent = self._absent(gathering)
        why = (
            f"{member} stopped waiting before trainer rank {absent} called publish()"
            if cancelled
            else f"trainer rank {absent} did not call publish(); every rank must call it"
        )
        self._fail(gathering, DeadlineExceeded(f"{gathering.what} was not published: {why}"))

    def _keep_place(self, gathering: _Gathering, member: str, reason: str) -> None:
        place = gathering.places[member]
        if place.away is None:
            why = f"{member} is gone ({reason}) while {gathering.what} was being published"
            error = PeerLost(f"{why}, and did not reconnect within {RETURN_SECONDS:g} s")
            place.away = asyncio.get_running_loop().call_later(RETURN_SECONDS, self._fail, gathering, error)

    def _fail(self, gathering: _Gathering, error: WeightSyncError) -> None:
        """Raise ``error`` in every rank that has asked, and in every other connected rank when it asks."""
        if gathering is self._gathering:
            self._gathering = None
        for place in gathering.places.values():
            if place.away is not None:
                place.away.cancel()
        gathering.owed = {
            member: link.node.rank.session for member, link in self._members.trainers.items() if member not in gathering.places
        }
        self._failed = gathering
        gathering.fail(error)
