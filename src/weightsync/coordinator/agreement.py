"""Prepare the ranks of a replica for a plan or for a stream, while the replica serves. What they are prepared for has a key.

A round that moves only the words that changed stages them while the replica serves, too, and undoes them if the round fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weightsync import failpoints
from weightsync.config import RoundSettings
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.negotiation import TransferPlan, address_of, key_of
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, in_thread, on_all, ranks_of
from weightsync.coordinator.ranks import EngineRank, PublishingRank, check_digests
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.round_context import Engines, Trainers
from weightsync.errors import DeadlineExceeded, PlanMismatch, WeightSyncError, readable
from weightsync.model import Layout, Version
from weightsync.protocol import messages
from weightsync.protocol.messages import Body, Done, LetGo, OpenStream, Prepare, Prepared, Resume, Revert, Stage, Staged
from weightsync.spans import span

_log = logging.getLogger(__name__)
_LEAST_WINDOW = 4096  # whatever buckets an engine asks for
_REASON = "the trainer publishes a stream"
_MOST_BASES = 8  # that a trainer rank is asked for


async def prepare(
    planner: Planner, sources: Mapping[str, PublishingRank], replica: Replica, engines: Engines, deadline: RoundDeadline
) -> TransferPlan:
    """Plan the transfer to ``engines``; ranks that are not ready for that plan connect, map memory and build copy tables.

    Raises:
        PlanMismatch: A rank acknowledged another plan than the one it was sent.
    """
    with span("plan", replica.name):
        agreed = await planner.agree(replica.name, sources, ranks_of(engines), deadline)
    digests = {member: piece.digest for member, piece in agreed.slices.items()}
    plans = {member: Prepare(piece) for member, piece in agreed.slices.items()}
    await acknowledged(agreed.key, digests, engines, deadline, plans)
    return agreed


async def keep_layouts(engines: Engines, deadline: RoundDeadline) -> None:
    """Let the ranks whose layouts change keep them until the end of the round, and take note of those that they have now."""
    moving = {member: link for member, link in engines.items() if link.rank.hello.moves}
    layouts = {member: link.rank.layout for member, link in moving.items()}
    asked = {member: messages.KeepLayout("" if layout is None else layout.digest) for member, layout in layouts.items()}
    for member, answer in (await on_all("hold", deadline, moving, asked, messages.LayoutKept)).items():
        if (columns := answer.layout) is not None:
            link = moving[member]
            layout = await in_thread("checking a layout", deadline, partial(Layout.from_columns, link.rank.manifest, columns))
            link.rank = replace(link.rank, layout=layout)


async def acknowledged(
    key: str, digests: Mapping[str, str], engines: Engines, deadline: RoundDeadline, message: Body | Mapping[str, Body]
) -> None:
    """Send ``message`` to the ranks that are not prepared for what ``key`` names. Each acknowledges its one of ``digests``.

    Raises:
        PlanMismatch: A rank acknowledged another digest.
    """
    unprepared = {member: link for member, link in engines.items() if link.prepared != key}
    for link in unprepared.values():
        link.prepared = None  # even if this fails: a rank drops its plan before it prepares another
    for member, answer in (await on_all("prepare", deadline, unprepared, message, Prepared)).items():
        if answer.digest != digests[member]:
            raise PlanMismatch(
                f"{member} acknowledged plan {answer.digest} instead of {digests[member]}: do both run the same weightsync?"
            )
        engines[member].prepared, engines[member].transports = key, answer.transports


async def wait_for_background(replica: Replica, deadline: RoundDeadline) -> None:
    """Wait for what runs outside any round: a quarantine, which would abort calls of this round, and a preparation."""
    for task, what in ((replica.quarantining, "an earlier failure's cleanup"), (replica.preparing, "preparing ahead of the round")):
        if task is not None:
            await asyncio.wait([task], timeout=deadline.remaining(what))


async def open_stream(trainers: Trainers, engines: Engines, deadline: RoundDeadline) -> TransferPlan:
    """Let engine ranks connect to the trainer's windows while they serve; those that have done so already are not asked.

    Raises:
        PlanMismatch: A rank acknowledged other sources than those it was sent.
    """
    sources, ranks = ranks_of(trainers), ranks_of(engines)
    key = key_of(sources, ranks)
    addresses = tuple(map(address_of, sources.values()))
    body = OpenStream(key, addresses, window_bytes_of(trainers, engines))
    await acknowledged(key, dict.fromkeys(engines, key), engines, deadline, body)
    return TransferPlan(key, "streamed", _REASON, {}, (), (*sources.values(), *ranks.values()))


def window_bytes_of(trainers: Trainers, engines: Engines) -> int:
    """Most bytes of a window: what every trainer rank and every engine rank allows."""
    largest = min(link.rank.hello.window_bytes for link in trainers.values())
    return min([largest, *(max(_LEAST_WINDOW, link.rank.hello.bucket_bytes) for link in engines.values())])


@dataclass(eq=False)
class PreparingAhead:
    """Prepares replicas for their next round while no round runs, and ends that when the trainer is gone.

    ``_running`` is held while a round runs. ``_spawn`` starts a task that the coordinator keeps.
    """

    _members: Membership
    _planner: Planner
    _settings: RoundSettings
    _running: asyncio.Lock
    _spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    _left: set[LetGo] = field(default_factory=set)
    _letting_go: bool = False

    def start(self, replica: Replica) -> None:
        """Prepare a replica now, if it is complete and the trainer is, and unless that goes on already."""
        trainers = self._members.trainers_in_order()
        whole = bool(trainers) and not self._members.missing_trainers(set(trainers))
        if whole and replica.complete and replica.refusal is None and replica.preparing is None:
            replica.preparing = self._spawn(self._prepare(replica, trainers))

    def stop_all(self) -> None:
        """Stop what runs: it prepares for trainer ranks that left or were replaced."""
        for replica in self._members.replicas.values():
            task, replica.preparing = replica.preparing, None
            if task is not None:
                task.cancel()

    def trainer_left(self) -> None:
        """Stop what runs, because a rank that hangs must not delay the next preparation.

        Unless the trainer comes back, engine ranks free what they hold for it: its successor may need the room.
        """
        self.stop_all()
        self.publisher_left(LetGo())

    def publisher_left(self, news: LetGo) -> None:
        """Let all engine ranks hear ``news`` after the grace. Those that are prepared for a trainer that came back do not."""
        self._left.add(news)
        if not self._letting_go:
            self._letting_go = True
            self._spawn(self._let_all_go())

    def replica_joined(self, replica: Replica) -> None:
        """Without a trainer, let it free what it may hold: the last coordinator may have ended together with the trainer."""
        if not self._members.trainers:
            self._spawn(self._let_go(lambda: (replica,), {LetGo()}))

    async def _let_all_go(self) -> None:
        """Once for all ranks that leave within the grace of the first, and once more for those after it."""
        try:
            while self._left:
                news, self._left = self._left, set()
                await self._let_go(self._members.replicas.values, news)
        finally:
            self._letting_go = False

    async def _let_go(self, of: Callable[[], Iterable[Replica]], news: Set[LetGo]) -> None:
        await asyncio.sleep(self._settings.grace)
        async with self._running:  # a round ends at its own deadline
            trainers = self._members.trainers_in_order()
            whole = bool(trainers) and not self._members.missing_trainers(set(trainers))
            sources = ranks_of(trainers) if whole else {}
            for replica in of():
                if LetGo(adapters=True) in news:
                    self._spawn(self._free(replica, replica.members(), LetGo(adapters=True)))
                if LetGo() not in news:
                    continue
                now = key_of(sources, ranks_of(replica.members())) if whole else None
                # Not only those that are known to be prepared: a rank that failed or reconnected holds as much.
                links = {member: link for member, link in replica.members().items() if now is None or link.prepared != now}
                if links and replica.preparing is None:
                    replica.preparing = self._spawn(self._free(replica, links, LetGo()))

    async def _free(self, replica: Replica, links: Engines, news: LetGo) -> None:
        async def one(member: str, link: RankHandle[EngineRank]) -> None:
            if not news.adapters:
                link.prepared = None
            try:
                await on_all("letting go", RoundDeadline(self._settings.grace), {member: link}, news, Done)
            except WeightSyncError as error:
                _log.info("%s may still hold memory of a trainer that is gone: %s", member, readable(str(error)))

        try:
            await asyncio.gather(*(one(*each) for each in links.items()))
        finally:
            self._ended(replica)

    async def _prepare(self, replica: Replica, trainers: Trainers) -> None:
        try:
            deadline = RoundDeadline(self._settings.timeout)
            if self._members.streams:
                await open_stream(trainers, replica.members(), deadline)
            else:
                await prepare(self._planner, ranks_of(trainers), replica, replica.members(), deadline)
        except WeightSyncError as error:
            _log.info("could not prepare %s ahead of its next round: %s", replica.name, readable(str(error)))
        finally:
            self._ended(replica)

    @staticmethod
    def _ended(replica: Replica) -> None:
        if replica.preparing is asyncio.current_task():
            replica.preparing = None


@dataclass(frozen=True, eq=False)
class StagedDelta:
    """What changed since ``base`` is at every rank of a replica, which still serves ``base``: so many bytes, by member.

    With streamed delivery every rank knows which tensors changed, and moves so many bytes. They are not reversible.
    """

    base: Version
    nbytes: Mapping[str, int]
    reversible: bool


def served_bases(replicas: Iterable[Replica], epoch: int) -> tuple[int, ...]:
    """Numbers of the versions of this ``epoch`` that replicas serve: the newest of them."""
    served = {replica.version.number for replica in replicas if replica.version is not None and replica.version.epoch == epoch}
    return tuple(sorted(served, reverse=True)[:_MOST_BASES])


async def stage(
    replica: Replica, engines: Engines, agreed: TransferPlan, placement: Placement, deadline: RoundDeadline
) -> StagedDelta | None:
    """Let every rank fetch what changed since the version that it serves, and say what its digests will be.

    They must add up to those of the new version, before anything is paused.

    Returns:
        ``None`` if all bytes must move, as the log says: the replica serves another version, a rank does not know what it
        installed, the changes are too many for its staging memory, or they do not lead to the new version.

    Raises:
        DeadlineExceeded: A rank did not answer in time. It was not paused.
    """
    delta = next((delta for delta in placement.deltas if delta.base == replica.version), None)
    if delta is None or replica.state != "loaded":
        return None
    direct, number = agreed.delivery == "direct", placement.version.number
    try:
        if direct:
            asked = {}
            for member in engines:
                sources = [source.member for source in agreed.slices[member].sources]
                asked[member] = Stage(number, delta.base, tuple(delta.changed[source] for source in sources))
        else:
            asked = dict.fromkeys(engines, Stage(number, delta.base, (), placement.digests.astype("<u8").tobytes()))
        staged = await _each(engines, asked, deadline)
        for member, answer in staged.items():
            check_digests(member, answer.digests, agreed.slices[member].layout.rows, "rows")
        await in_thread("verifying what is staged", deadline, lambda: agreed.check(staged, placement.digests))
    except DeadlineExceeded:
        raise
    except WeightSyncError as error:
        _log.info("replica %s gets all bytes of version %s, not its changes: %s", replica.name, placement.version, error)
        return None
    failpoints.reached("round.staged")
    return StagedDelta(delta.base, {member: answer.nbytes for member, answer in staged.items()}, reversible=direct)


async def _each(engines: Engines, asked: Mapping[str, Stage], deadline: RoundDeadline) -> dict[str, Staged]:
    """Ask every rank, and wait for all: a call that is withdrawn ends the connections by which the rank then reads all bytes."""
    calls = (on_all("stage", deadline, {member: link}, asked[member], Staged) for member, link in engines.items())
    answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, DeadlineExceeded)):
        raise error
    return {member: staged for answer in answers if not isinstance(answer, BaseException) for member, staged in answer.items()}


async def reverted(replica: Replica, engines: Engines, base: Version, seconds: float) -> bool:
    """Put the words of ``base`` back at every rank, and let all generate with it again, within ``seconds``.

    Returns:
        Whether the replica serves ``base``. If not, it must be quarantined.
    """
    deadline = RoundDeadline(seconds)
    try:
        await on_all("revert", deadline, engines, Revert(base), Done)
        failpoints.reached("round.reverted")
        await on_all("resume", deadline, engines, Resume(), Done)
        for link in engines.values():
            link.prepared = None  # as after every failure: a rank may have dropped its connections
        replica.succeed(dict(engines), base)
    except WeightSyncError as error:
        _log.warning("replica %s could not go back to version %s: %s", replica.name, base, error)
        return False
    return True
