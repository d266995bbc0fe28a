"""Barrier of the trainer's ranks before a publication: all ranks publish the same number, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Never

from weightsync.coordinator.counts import PublishCounts
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publications import REMEDY, Epochs, Publications
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import RankNode, TrainerRank
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    ManifestMismatch,
    MembershipError,
    PeerLost,
    RoundFailed,
    VersionError,
    WeightSyncError,
)
from weightsync.model import PauseMode, Version
from weightsync.protocol.messages import Publish, RoundResult
from weightsync.protocol.notices import reminding

RETURN_SECONDS = 10.0
"""Seconds that a rank keeps its place in the barrier while its connection is broken."""

_Position = tuple[bool, int, int]
"""Of a publication without a number: whether it has a step, the step, the count. Ordered where the first is equal."""

_LAST_NUMBER = (1 << 63) - 1
_ANSWER_SECONDS = 1.0  # from the end of a round to the end of its publication, for the answers


class OutOfCount(VersionError):
    """The publication in which the other ranks are is a later or an earlier one by the count of this process, which was a guess."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the other trainer ranks are at publication {count}")
        self.count = count


@dataclass(frozen=True)
class AgreedPublication:
    """What all trainer ranks have asked for."""

    epoch: int
    number: int
    deadline: RoundDeadline
    """The earliest of all ranks."""
    step: int | None = None
    pause_mode: PauseMode | None = None
    version: Version | None = None
    """What it must become. It may be the last version, with the same bytes."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """The call of ``publish()`` by which each trainer rank asked, by member. A rank places for that call only: an interrupted one
    is over for its rank, even if it calls again at once."""

    def limits(self, grace: float) -> tuple[RoundDeadline, float]:
        """Return the round's deadline, which leaves time for its answers, and the seconds for a quarantine: at most ``grace``."""
        left = self.deadline.left
        grace = min(grace, left / 5)  # a long quarantine must not delay the end of a short publication
        return RoundDeadline(left - grace - min(_ANSWER_SECONDS, left / 20)), grace


@dataclass
class _Arrival:
    """A rank that has asked to publish."""

    link: RankHandle[TrainerRank]
    deadline: RoundDeadline
    asked: Publish
    counted: _Position | None = None
    """``None`` if it counts nothing."""
    away: asyncio.TimerHandle | None = None
    """Timer that runs while the rank's connection is broken. When it fires, the other ranks stop waiting."""

    @property
    def session(self) -> str:
        return self.link.rank.hello.session

    @property
    def position(self) -> _Position | None:
        """``None`` if it has a number, or counts nothing."""
        return self.counted if self.asked.number is None else None


class _Gathering:
    """Ranks that want to publish one number, and the outcome."""

    def __init__(self, number: int | None, adapter: str) -> None:
        self.adapter = adapter
        self.number = number
        """``None`` while every rank leaves the number to the coordinator."""
        self.position: _Position | None = None
        """That of the ranks which leave the number to the coordinator."""
        self.reached: dict[str, str] = {}
        """Ranks, with their sessions, that have asked, or have said that they cannot."""
        self.epoch = 0
        """Set once all ranks have asked."""
        self.places: dict[str, _Arrival] = {}
        self.owed: dict[str, str] = {}
        """Ranks, with their sessions, that had not asked when the publication failed. They get the error when they ask."""
        self.result: asyncio.Future[RoundResult] = asyncio.get_running_loop().create_future()

    @property
    def what(self) -> str:
        """Description of the publication for messages."""
        of = self.adapter and f" of {self.adapter}"
        return f"the next version{of}" if self.number is None else f"version {self.number}{of}"

    def same(self, number: int | None) -> bool:
        """Whether a rank that asks for ``number`` may join this publication."""
        return number is None or self.number is None or number == self.number

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # mark as retrieved: perhaps no call is left to raise it

    def follow(self, round_: asyncio.Task[RoundResult], reserved: set[tuple[int, int]]) -> None:
        """Copy the outcome of the round that has started to the result. Its number is ``reserved`` until then."""
        this = self.epoch, self.number or 0
        reserved.add(this)

        def ended(done: asyncio.Task[RoundResult]) -> None:
            reserved.discard(this)
            if done.cancelled():
                self.fail(Aborted(f"the publication of {self.what} was cancelled"))
            elif (error := done.exception()) is not None:
                self.fail(error)
            elif not self.result.done():
                self.result.set_result(done.result())

        round_.add_done_callback(ended)


@dataclass(eq=False)
class PublishBarrier:
    """Barrier that calls ``start`` once all trainer ranks have asked to publish the same number in the same way.

    A rank whose connection breaks keeps its place for :data:`RETURN_SECONDS`. It asks again when it has reconnected. Errors name
    the ``adapter``, if it is one's versions that are published here. Barriers of the same ranks share their ``counts``, and
    ``check`` raises an error if a rank that enters cannot meet the others.
    """

    _members: Membership
    _publications: Publications
    _start: Callable[[AgreedPublication], asyncio.Task[RoundResult]]
    _waiting_for: Callable[[], str] = lambda: ""
    adapter: str = ""
    counts: PublishCounts = field(default_factory=PublishCounts)
    check: Callable[[str], None] = lambda member: None
    _gathering: _Gathering | None = field(default=None, init=False)
    _running: _Gathering | None = field(default=None, init=False)
    _failed: _Gathering | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Epochs are those of the publications."""
        self.epochs = Epochs(self._publications)

    @property
    def waiting(self) -> dict[str, Publish]:
        """What each rank that waits for others has asked for, by member."""
        return {} if self._gathering is None else {member: place.asked for member, place in self._gathering.places.items()}

    @property
    def idle(self) -> bool:
        """Whether no rank waits here, and none that is connected has an error to hear of. A round may run."""
        owed = {} if self._failed is None else self._failed.owed
        sessions = ((member, link.rank.hello.session) for member, link in self._members.trainers.items())
        return self._gathering is None and not any(owed.get(member) == session for member, session in sessions)

    def join(self, node: RankNode[TrainerRank]) -> None:
        """Add a trainer rank, as :meth:`Membership.add_trainer` does, and tell its process after which publication it starts."""
        try:
            link = self._members.add_trainer(node)
        except ManifestMismatch:
            self.proceed()
            raise
        self.counts.joined(link, self._members.trainers, self.waiting)

    async def publish(self, member: str, asked: Publish, deadline: RoundDeadline) -> RoundResult:
        """See :meth:`weightsync.coordinator.coordinator.Coordinator.publish`."""
        link = self._members.trainers.get(member)
        if link is None:
            raise MembershipError(f"{member} is not a trainer rank and cannot publish")
        place = _Arrival(link, deadline, asked, self._counted(member, asked.step, asked.count))
        number = asked.placed if asked.placed >= 0 else asked.number
        gathering = self._asked_before(link, asked.call)
        if gathering is None:
            self._tell_failure(member, number, place.position)
            gathering = self._enter(member, number, place)
        self.proceed()
        cancelled = True
        try:
            with reminding(lambda: self._remind(gathering, link)):
                await asyncio.wait([gathering.result], timeout=deadline.remaining(f"the publication of {gathering.what}"))
            cancelled = False
        finally:
            if gathering is self._gathering and not gathering.result.done() and gathering.places.get(member) is place:
                self._stop_waiting(gathering, member, link, cancelled)
        if not gathering.result.done():
            raise DeadlineExceeded(f"the round of {gathering.what} is still running after {deadline.seconds:g} s")
        return gathering.result.result()

    def cannot_publish(self, member: str, number: int | None, reason: str, step: int | None = None, count: int = 0) -> None:
        """Fail the publication for all ranks because ``member`` failed before it could ask."""
        link = self._members.trainers.get(member)
        if link is None:
            return
        gathering, counted = self._gathering, self._counted(member, step, count)
        position = counted if number is None else None
        earlier = _compare(position, None if gathering is None else gathering.position)
        if gathering is not None and earlier < 0:
            return  # the others are further, and learn from that that this rank missed one
        known = None if gathering is not None or number is None else self._failed
        if known is not None and known.same(number) and known.owed.pop(member, "") == link.rank.hello.session:
            return  # that publication was failed by another rank already
        failed = _Gathering(number, self.adapter)
        failed.position = position
        error = Aborted(f"{failed.what} was not published: {member} failed before it placed its shards: {reason}")
        if gathering is not None and earlier > 0:
            self._fail(gathering, error)
        if gathering is None or earlier > 0 or not gathering.same(number):
            gathering = failed
        gathering.reached[member] = link.rank.hello.session
        self._fail(gathering, error)
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

    def proceed(self) -> None:
        """Begin the pending publication if all ranks have asked, or fail it if one of them was refused since the last one."""
        gathering, refused = self._gathering, self._members.refused_trainers
        if gathering is not None and not self._absent(gathering):
            self._begin(gathering)
        elif gathering is not None and refused:
            for member in self._members.trainers:  # a process that joins instead of the refused one starts after this publication
                self.counts[member].took_part = True
            self._fail(gathering, ManifestMismatch(f"{gathering.what} was not published: {'; '.join(refused.values())}"))
            refused.clear()

    def fail(self, error: WeightSyncError, member: str = "") -> None:
        """Fail the pending publication, of which ``member`` knows."""
        if (gathering := self._gathering) is not None:
            self._fail(gathering, error)
            gathering.owed.pop(member, None)

    # Entering.

    def _asked_before(self, link: RankHandle[TrainerRank], call: int) -> _Gathering | None:
        """Publication that this same call asked for before its connection broke, whether or not an answer was sent."""
        for gathering in (self._running, self._failed):
            place = None if gathering is None else gathering.places.get(link.member)
            if call and place is not None and (place.session, place.asked.call) == (link.rank.hello.session, call):
                return gathering
        return None

    def _counted(self, member: str, step: int | None, count: int) -> _Position | None:
        """Which publication ``member`` asks for, or fails in, by its count."""
        if step is None:
            self.counts[member].count = count
        return (step is not None, step or 0, count) if count else None

    def _tell_failure(self, member: str, number: int | None, position: _Position | None) -> None:
        failed, gathering = self._failed, self._gathering
        mine = position if number is None else number
        if failed is None or (gathering is not None and mine is not None and mine in (gathering.number, gathering.position)):
            return  # it names the publication of those that try again, and joins them
        owed = failed.owed.pop(member, None) == self._members.trainers[member].rank.hello.session and failed.same(number)
        if position is not None and failed.position is not None and position[0] == failed.position[0]:
            sessions = {other: link.rank.hello.session for other, link in self._members.trainers.items()}
            reached = {other for other, session in failed.reached.items() if sessions.get(other) == session}
            owed = position <= failed.position and bool(reached) and member not in reached
            if position == failed.position:  # steps may repeat, and it hears of this failure once
                failed.reached[member] = sessions[member]
        if owed:
            failed.result.result()

    def _enter(self, member: str, number: int | None, place: _Arrival) -> _Gathering:
        gathering = self._gathering
        try:
            self._check_number(member, place, number)
        except VersionError as refusal:
            if gathering is not None and gathering.number == number:  # a replica reported it after the others had asked
                self._fail(gathering, refusal)
                gathering.owed.pop(member, None)
            raise
        if gathering is not None:
            gathering = self._in_step(gathering, member, number, place)
        if gathering is None:
            gathering = self._gathering = _Gathering(number, self.adapter)
        if not gathering.same(number):
            present = ", ".join(gathering.places)
            differ = VersionError(
                f"trainer ranks differ: {member} publishes version {number}, {present} version {gathering.number}"
            )
            self._refuse(gathering, member, place, differ)
        others = [rank for rank, other in gathering.places.items() if rank != member and _steps_differ(other, place)]
        if others:
            mine, theirs = (
                "no step" if rank.asked.step is None else f"step {rank.asked.step}" for rank in (place, gathering.places[others[0]])
            )
            why = f"trainer ranks differ: {member} publishes {gathering.what} with {mine}, {', '.join(others)} with {theirs}"
            self._refuse(gathering, member, place, VersionError(f"{why}: give every rank the same step"))
        mode = place.asked.pause_mode
        others = [rank for rank, other in gathering.places.items() if rank != member and other.asked.pause_mode != mode]
        if others:
            mine, theirs = (arrival.asked.pause_mode or "no" for arrival in (place, gathering.places[others[0]]))
            why = f"trainer ranks differ: {member} publishes with {mine} pause mode, {', '.join(others)} with {theirs} pause mode"
            self._refuse(gathering, member, place, ConfigurationError(f"{why}: give every rank the same pause_mode"))
        held = gathering.places.get(member)
        if held is not None and held.away is not None:
            held.away.cancel()
        if self._failed is not None:
            self._failed.owed.pop(member, None)  # it joins the others in this publication
        gathering.number = number if gathering.number is None else gathering.number
        gathering.position = place.position or gathering.position
        gathering.places[member], gathering.reached[member] = place, place.session
        try:
            self.check(member)
        except WeightSyncError as error:
            self._refuse(gathering, member, place, error)
        return gathering

    def _in_step(self, gathering: _Gathering, member: str, number: int | None, place: _Arrival) -> _Gathering | None:
        """The publication in which others wait, or ``None`` if it has failed because ``member`` is in a later one.

        Raises:
            VersionError: ``member`` is in an earlier one, or publishes already.
        """
        held = gathering.places.get(member)
        mine = held is not None and held.session == place.session
        if held is not None and mine and held.asked.call == place.asked.call and held.link is place.link:
            raise VersionError(f"{member} is already publishing {gathering.what}")
        if held is not None and mine and held.asked.call != place.asked.call and (number is None or number != gathering.number):
            self._fail(gathering, Aborted(f"{gathering.what} was not published: {member} was interrupted, and publishes again"))
            return None
        placed = [other for rank, other in gathering.places.items() if rank != member]
        unlike = next((other for other in placed if _order(place, other)), None)
        if unlike is None:
            return gathering
        if unlike.asked.step == place.asked.step:  # a step is the framework's own, and no guess
            self._put_right(gathering, member, place)
        if gathering is not self._gathering:
            return None
        order, theirs = _order(place, unlike), unlike.counted
        others = ", ".join(rank for rank in gathering.places if rank != member)
        differ = VersionError(
            f"trainer ranks differ: {member} is at {_described(place.counted)}, {others} at {_described(theirs)} "
            "(calls that failed count). The earlier one is not published; its ranks are in step again with their next call"
        )
        if order < 0:
            raise differ
        self._fail(gathering, differ)
        return None

    def _put_right(self, gathering: _Gathering, member: str, place: _Arrival) -> None:
        """Let processes that reached this coordinator before all others, and began to count anew, ask again as the others count.

        Raises:
            OutOfCount: ``member`` is one of them.
        """
        others = [rank for rank in gathering.places if rank != member]
        mine, adrift = self.counts[member], [self.counts[rank].adrift for rank in others]
        if mine.adrift and not all(adrift):
            count = next(other.asked.count for rank, other in gathering.places.items() if not self.counts[rank].adrift)
            if count != place.asked.count:
                raise OutOfCount(count)
        if not mine.adrift and all(adrift):
            self._gathering = None
            for waiting in gathering.places.values():
                if waiting.away is not None:
                    waiting.away.cancel()
            gathering.fail(OutOfCount(place.asked.count))

    def _refuse(self, gathering: _Gathering, member: str, place: _Arrival, error: WeightSyncError) -> Never:
        """Fail the publication for all ranks, because ``member`` asked for another one than they did."""
        gathering.places.setdefault(member, place)
        self._fail(gathering, error)
        raise error

    def _check_number(self, member: str, place: _Arrival, number: int | None) -> None:
        epoch = self.epochs.of(place.link.rank)
        last = -1 if epoch is None else self._publications.highest_in(epoch)
        again = place.asked.version is not None and not self.adapter and (epoch, number) in self._publications.published
        if number is not None and number <= last - again:
            what = f"{self.adapter}@{number} cannot be published" if self.adapter else f"{member} cannot publish version {number}"
            raise VersionError(f"{what}: the last one is {last}, and numbers only go up. {self._remedy}")

    @property
    def _remedy(self) -> str:
        if self.adapter:
            return "publish() without a number takes the next one"
        witness = self._publications.witness
        only = f"Only {witness} reports it; if that cannot be, `weightsync revoke {witness}`. Else, " if witness else ""
        return only + REMEDY

    def _begin(self, gathering: _Gathering) -> None:
        """Start the round, now that all ranks have asked: decide its epoch and number."""
        self._gathering = None
        ranks = [place.link.rank for place in gathering.places.values()]
        try:
            gathering.epoch = self.epochs.decide(ranks)
            last = self._publications.highest_in(gathering.epoch)
            if gathering.number is None:
                before = [place.asked.above for member, place in gathering.places.items() if self.counts[member].elsewhere]
                gathering.number = max([last, *before]) + 1
            versions = {place.asked.version for place in gathering.places.values()}
            version = versions.pop() if len(versions) == 1 and not self.adapter else None
            if version is not None and version.order != (gathering.epoch, gathering.number):
                is_now = f"number {gathering.number} of epoch {gathering.epoch}"
                raise VersionError(f"version {version} cannot be published: here it would be {is_now}. {self._remedy}")
            if not last - (version is not None) < gathering.number <= _LAST_NUMBER:
                what = f"{self.adapter}@{gathering.number}" if self.adapter else f"version {gathering.number}"
                raise VersionError(f"{what} cannot be published: the last one is {last}. {self._remedy}")
            _check_placed(gathering)
        except (VersionError, RoundFailed) as error:
            self._fail(gathering, error)
            return
        self._running = gathering
        if self._failed is not None:  # every rank has asked since, so none is left to hear of it
            self._failed.reached.clear()
        for member in gathering.places:
            self.counts[member].took_part = True
        limit = min((place.deadline for place in gathering.places.values()), key=lambda limit: limit.at)
        step = next((place.asked.step for place in gathering.places.values() if place.asked.step is not None), None)
        mode = next(iter(gathering.places.values())).asked.pause_mode
        calls = {member: place.asked.call for member, place in gathering.places.items()}
        self._publications.promised = version
        started = self._start(AgreedPublication(gathering.epoch, gathering.number, limit, step, mode, version, calls))
        gathering.follow(started, self._publications.reserved)

    # Waiting, and giving up.

    def _absent(self, gathering: _Gathering) -> str:
        """Trainer ranks that have not asked or are disconnected, for messages; empty if none is missing."""
        present = {member for member, place in gathering.places.items() if self._members.trainers.get(member) is place.link}
        connected = {link.rank.hello.rank for link in self._members.trainers.values()}
        missing = self._members.missing_trainers(present)
        return ", ".join(str(rank) if rank in connected else f"{rank} (not connected)" for rank in missing)

    def _remind(self, gathering: _Gathering, link: RankHandle[TrainerRank]) -> None:
        if gathering is self._gathering:
            link.node.notify(f"waiting for trainer rank {self._absent(gathering)} to publish {gathering.what}")
        elif not gathering.result.done():
            link.node.notify(f"waiting for the round of {gathering.what}{self._waiting_for()}")

    def _stop_waiting(self, gathering: _Gathering, member: str, link: RankHandle[TrainerRank], cancelled: bool) -> None:
        """Handle the end of one rank's call: its deadline passed, it was cancelled, or its connection broke."""
        if cancelled and self._members.trainers.get(member) is not link:
            self._keep_place(gathering, member, "its connection broke")
            return
        absent, failed = self._absent(gathering), f"{gathering.what} was not published"
        error = (
            Aborted(f"{failed}: {member} was interrupted before trainer rank {absent} called publish()")
            if cancelled
            else DeadlineExceeded(f"{failed}: trainer rank {absent} did not call publish(); every rank must call it")
        )
        self._fail(gathering, error)

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
            member: link.rank.hello.session for member, link in self._members.trainers.items() if member not in gathering.places
        }
        self._failed = gathering
        gathering.fail(error)


def _compare(mine: _Position | None, theirs: _Position | None) -> int:
    """-1 or 1 if a rank's publication is earlier or later than that of the others; 0 if it is the same, or neither says so."""
    if mine is None or theirs is None or mine[0] != theirs[0]:
        return 0
    return (mine > theirs) - (mine < theirs)


def _order(mine: _Arrival, theirs: _Arrival) -> int:
    """As :func:`_compare`. Ranks that both have a number are not compared: that says what belongs together."""
    return _compare(mine.counted, theirs.counted) if mine.asked.number is None or theirs.asked.number is None else 0


def _described(position: _Position | None) -> str:
    if position is None or not position[0]:
        return "an unknown publication" if position is None else f"publication {position[2]}"
    return f"step {position[1]}" + (f" (publication {position[2]} of it)" if position[2] > 1 else "")


def _steps_differ(mine: _Arrival, theirs: _Arrival) -> bool:
    if mine.asked.step is None or theirs.asked.step is None:
        return mine.asked.step != theirs.asked.step and (mine.position is not None or theirs.position is not None)
    return mine.asked.step != theirs.asked.step


def _check_placed(gathering: _Gathering) -> None:
    """Check that all ranks have placed the version for these calls, or none has.

    Raises:
        RoundFailed: The coordinator was lost in between. The shards of a rank that has not placed may be of a later step by now.
    """
    placed = [member for member, place in gathering.places.items() if place.asked.placed >= 0]
    if placed and len(placed) < len(gathering.places):
        others = ", ".join(member for member in gathering.places if member not in placed)
        raise RoundFailed(
            f"the coordinator was lost while {gathering.what} was placed: {', '.join(placed)} had placed it, {others} had not. "
            "Publish again, as the next version"
        )
