"""What one round needs, given to it by the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from weightsync.config import RoundSettings
from weightsync.coordinator.events import Watcher
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Placement, Publications
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.sources import Source, Sources, ranks_of
from weightsync.coordinator.stored_versions import StoredSource
from weightsync.model import PauseMode
from weightsync.protocol.messages import ReplicaResult

Trainers = Mapping[str, RankHandle[TrainerRank]]
Engines = Mapping[str, RankHandle[EngineRank]]
Placing = asyncio.Task[tuple[Placement, float]]
"""A task that places the version. Its result holds the seconds that it took as well."""


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
