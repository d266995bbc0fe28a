"""What one round needs, given to it by the coordinator.

And from whom each of its replicas reads: the trainer, or a replica that serves the round's version to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from msgspec import structs

from weightsync.arrays import UInt64
from weightsync.config import RoundSettings
from weightsync.coordinator.events import Watcher
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Placement, Publications
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, bounded, ranks_of
from weightsync.coordinator.ranks import EngineRank, PublishingRank, TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import Report
from weightsync.coordinator.stored_versions import StoredSource
from weightsync.errors import StaleSource
from weightsync.model import PauseMode
from weightsync.protocol.messages import ReplicaResult
from weightsync.protocol.store_messages import STORE

Trainers = Mapping[str, RankHandle[TrainerRank]]
Engines = Mapping[str, RankHandle[EngineRank]]
Placing = asyncio.Task[tuple[Placement, float]]
"""A task that places the version. Its result holds the seconds that it took as well."""

_TRAINER = "trainer"
_ELSEWHERE = 2


class Source:
    """Ranks that hold a whole version together: the trainer's, or those of ``replica`` for as long as it serves its version.

    The store, if ``stored``, takes the trainer's place. Its bytes are the trainer's, too.
    """

    def __init__(self, ranks: Mapping[str, PublishingRank], replica: Replica | None = None, *, stored: bool = False) -> None:
        self.name = replica.name if replica is not None else STORE if stored else _TRAINER
        self.stored = stored
        self.ranks = ranks
        self.replica = replica
        self.readers = 0
        """Replicas that read from it now."""
        self.overdue = 0
        """Readers among them that took half of the round. Others no longer wait for them."""
        self.placing = asyncio.Lock()
        """Held while a replica makes its version readable."""
        self.digests: UInt64 | None = None
        """Digest of each tensor that a replica made readable, ``uint64[tensors]``; ``None`` before."""
        self.failed = False
        """Whether it did not make its version readable when it was asked to."""
        self.links = {} if replica is None else replica.members()
        self.version = None if replica is None else replica.version

    @property
    def serves(self) -> bool:
        """Whether it can be read: a replica that was paused, updated, quarantined or lost since cannot."""
        replica = self.replica
        if replica is None:
            return True
        return replica.readable and replica.version == self.version and replica.members() == self.links

    def distance(self, reader: Replica) -> int:
        """0 if they share memory, 1 if they are on one machine, 2 otherwise."""
        mine = [rank.hello.host for rank in self.ranks.values()]
        theirs = [link.rank.hello.host for link in reader.links.values()]
        if {host.memory for host in mine} & {host.memory for host in theirs}:
            return 0
        return 1 if {host.name for host in mine} & {host.name for host in theirs} else _ELSEWHERE


@dataclass(eq=False)
class _ReadingReplica:
    """A replica that needs a source, another than the one that failed it, and the source that it is assigned."""

    replica: Replica
    failed: Source | None = None
    assigned: asyncio.Future[Source] | None = None


class Sources:
    """Assigns the readers of one round to sources: near ones first, then those with few readers. Used on one event loop.

    Without ``fan_out`` all replicas read from the trainer, if it can be read. With it, a source has at most so many readers at a
    time, not counting those that take longer than half of the round. The others wait, and replicas that serve their weights become
    sources when they are updated. From then on the trainer gets no further readers, except from its own machine.

    Args:
        trainer: The trainer; ``None`` if it cannot be read.
        replicas: Replicas that can be read from the beginning.
        fan_out: Most readers of a source; ``None`` for no limit.
    """

    def __init__(self, trainer: Source | None, replicas: Iterable[Replica], fan_out: int | None) -> None:
        self.trainer = trainer
        self._fan_out = fan_out
        self._replicas: dict[str, Source] = {}
        self._waiting: list[_ReadingReplica] = []
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Let others read from ``replica`` if it serves its weights. Waiting replicas may get it at once."""
        if replica.readable:
            ranks = {link.member: link.rank.source for link in replica.links.values()}
            self._replicas[replica.name] = Source({name: rank for name, rank in ranks.items() if rank is not None}, replica)
        self._assign()

    def nearest(self, reader: Replica) -> list[Source]:
        """Replicas that can be read now, the one first that ``reader`` is assigned to if all are free."""
        return sorted(self._readable(_ReadingReplica(reader)), key=lambda source: _preference(source, reader))

    @asynccontextmanager
    async def lease(self, report: Report, deadline: RoundDeadline, failed: Source | None = None) -> AsyncIterator[Source]:
        """Wait for a source, and count the replica of ``report`` among its readers for the duration of the block.

        A replica whose first source ``failed`` gets the trainer at once, or waits for another source.

        Raises:
            StaleSource: There is no source any more.
            DeadlineExceeded: ``deadline`` passed.
        """
        reader = _ReadingReplica(report.replica, failed)
        source = self._choose(reader)
        if source is None:
            with report.phase("wait"):
                source = await self._wait(reader, deadline)
        else:
            source.readers += 1
        overdue = False

        def admit_another() -> None:
            nonlocal overdue
            overdue = True
            source.overdue += 1
            self._assign()

        timer = asyncio.get_running_loop().call_later(deadline.seconds / 2, admit_another)
        try:
            yield source
        finally:
            timer.cancel()
            source.overdue -= overdue
            self._release(source)

    def alternative(self, source: Source, replica: Replica) -> bool:
        """Whether ``replica`` could read from another source if ``source``, a replica, fails it."""
        return source is not self.trainer and (self.trainer is not None or bool(self._readable(_ReadingReplica(replica, source))))

    def _readable(self, reader: _ReadingReplica) -> list[Source]:
        others = (source for source in self._replicas.values() if source.replica is not reader.replica)
        return [source for source in others if source.serves and not source.failed and source is not reader.failed]

    def _choose(self, reader: _ReadingReplica) -> Source | None:
        """The source for ``reader``; ``None`` if it must wait. Raises StaleSource if none will come."""
        sources, trainer = self._readable(reader), self.trainer
        if trainer is not None and reader.failed is not None:
            return trainer
        if trainer is not None and (not sources or (self._fan_out is None and not trainer.stored)):
            sources = [trainer]
        elif trainer is not None and trainer.distance(reader.replica) < _ELSEWHERE:
            sources.append(trainer)
        elif not sources and not any(source.readers for source in self._replicas.values()):
            raise StaleSource("no replica serves this version to others any more; the next publication updates this one")
        free = [source for source in sources if self._fan_out is None or source.readers - source.overdue < self._fan_out]
        return min(free, key=lambda source: _preference(source, reader.replica), default=None)

    async def _wait(self, reader: _ReadingReplica, deadline: RoundDeadline) -> Source:
        assigned = reader.assigned = asyncio.get_running_loop().create_future()
        self._waiting.append(reader)
        try:
            return await bounded("waiting for a source", deadline, assigned)
        except BaseException:
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self._release(assigned.result())  # assigned in the moment in which the wait ended
            raise
        finally:
            assigned.cancel()
            self._waiting.remove(reader)

    def _release(self, source: Source) -> None:
        source.readers -= 1
        self._assign()

    def _assign(self) -> None:
        """Give free sources to those that wait, in the order of their arrival."""
        for reader in self._waiting:
            if reader.assigned is None or reader.assigned.done():
                continue
            try:
                source = self._choose(reader)
            except StaleSource as error:
                reader.assigned.set_exception(error)
                continue
            if source is not None:
                source.readers += 1
                reader.assigned.set_result(source)


def serving_weights(members: Membership, publications: Publications, readers: Collection[Replica] = ()) -> list[Replica]:
    """Replicas that serve the last version, and from which others, the ``readers``, may read it.

    Only a trainer rank brings a version into the run: there are none if no trainer rank has published or reported the last one to
    this coordinator, whatever replicas claim to serve. There are none while the trainer publishes streams either: a round from a
    stream has no plan, and readers are not prepared for another.
    """
    published = publications.published.get((publications.epoch, publications.last))
    if published is None or members.streams:
        return []
    return [
        replica
        for replica in members.replicas.values()
        if replica.readable and replica not in readers and replica.version == published
    ]


def _preference(source: Source, reader: Replica) -> tuple[int, int, bool, str]:
    return source.distance(reader), source.readers, source.name != reader.fed_by, source.name


@dataclass(frozen=True, eq=False)
class RoundContext:
    """Inputs of one round, filled in by the coordinator."""

    round: int
    number: int
    """Version number to publish; for seeding, the number of the published version."""
    epoch: int
    """Epoch of ``number``."""
    seeding: bool
    """Whether to deliver the version that is already published instead of placing a new one."""
    trainers: Trainers
    replicas: Sequence[Replica]
    publications: Publications
    settings: RoundSettings
    deadline: RoundDeadline
    grace: float
    """Seconds that a quarantine may take, even after ``deadline``. At most the settings' value."""
    emit: Watcher
    exclude: Callable[[Replica, str], None]
    """Takes a replica out of service that does not hold the bytes of its version, and says why."""
    pause_mode: PauseMode
    """What a pause does to running requests."""
    keyed: KeyedDigester
    """What replicas that read from other replicas are compared with."""
    planner: Planner
    announced: Callable[[], Awaitable[None]]
    """Returns when routers know which replicas serve now, or after the settings' drain."""
    readable: Sequence[Replica] = ()
    """For seeding, replicas that serve the version and from which others can read it."""
    stored: StoredSource | None = None
    """For seeding, the version in the store, if the trainer does not hold it."""
    left_out: Sequence[ReplicaResult] = ()
    """Results of replicas that cannot take part. The round's result lists and counts them."""
    step: int | None = None
    """The training framework's own count, for display."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """The call of ``publish()`` by which each trainer rank asked for this version, by member."""
    serving: asyncio.Semaphore = field(init=False)
    """One permit for each replica that may be out of service at a time."""
    sources: Sources = field(init=False)

    def __post_init__(self) -> None:
        """Create as many permits as the settings allow; without a limit, one for each replica. Find the sources."""
        places = self.settings.max_unavailable or max(len(self.replicas), 1)
        object.__setattr__(self, "serving", asyncio.Semaphore(places))
        trainer: Source | None = Source(ranks_of(self.trainers))
        if self.seeding and self.publications.current(self.trainers) is None:
            trainer = None if self.stored is None else Source(self.stored.ranks, stored=True)
        object.__setattr__(self, "sources", Sources(trainer, self.readable, self.settings.fan_out))

    def absent(self) -> list[ReplicaResult]:
        """Return the results of replicas that cannot take part, as they are at the end of the round."""
        behind = self.publications.behind(None)
        return [structs.replace(result, staleness=behind) if result.error else result for result in self.left_out]
