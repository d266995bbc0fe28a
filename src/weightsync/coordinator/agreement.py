"""Prepare the ranks of a replica for a plan or for a stream, while the replica serves. What they are prepared for has a key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from typing import Any

from weightsync.config import RoundSettings
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.negotiation import TransferPlan, address_of, key_of
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, on_all, ranks_of
from weightsync.coordinator.ranks import EngineRank, PublishingRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.round_context import Engines, Trainers
from weightsync.errors import PlanMismatch, WeightSyncError, readable
from weightsync.protocol.messages import Body, Done, LetGo, OpenStream, Prepare, Prepared
from weightsync.spans import span

_log = logging.getLogger(__name__)
_LEAST_WINDOW = 4096  # whatever buckets an engine asks for
_REASON = "the trainer publishes a stream"


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


class PreparingAhead:
    """Prepares replicas for their next round while no round runs, and ends that when the trainer is gone.

    ``running`` is held while a round runs. ``spawn`` starts a task that the coordinator keeps.
    """

    def __init__(
        self,
        members: Membership,
        planner: Planner,
        settings: RoundSettings,
        running: asyncio.Lock,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._members, self._planner, self._settings, self._running, self._spawn = members, planner, settings, running, spawn
        self._left, self._letting_go = set[LetGo](), False

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
