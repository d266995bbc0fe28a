"""One look tells: a snapshot of a coordinator, for people and programs."""

from __future__ import annotations

import msgspec

from weightsync.model import FIRST_EPOCH, Version
from weightsync.protocol.messages import RoundResult

__all__ = ["Gauges", "RankStatus", "ReplicaGauges", "ReplicaStatus", "Status"]


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connected rank."""

    member: str
    rank: int
    host: str
    pid: int
    """Of its process on that host."""


class ReplicaStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica. ``version`` and ``digest`` are ``None`` unless it is loaded."""

    name: str
    state: str
    """``refused`` if it is connected and holds other tensors than the trainer; else see ``weightsync.coordinator.replicas``."""
    routable: bool
    """Whether requests may be sent to it."""
    version: int | None
    digest: str | None
    staleness: int | None
    """Publications that are newer than what it serves; ``None`` if it serves none."""
    since: float
    """When it entered this state, seconds since the epoch."""
    world_size: int
    missing: tuple[int, ...]
    """Ranks that are not connected: the first sixteen of them. ``world_size`` and ``ranks`` say how many there are."""
    ranks: tuple[RankStatus, ...]
    adapter: str
    error: str | None
    """Why the last attempt on it failed."""
    phases: dict[str, float]
    """Seconds by phase of the last round that it took part in."""
    epoch: int | None = None
    """The epoch of ``version``."""


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A coordinator at one moment."""

    run: str
    last: int
    """The highest published version number of the latest epoch that is known, or -1."""
    version: Version | None
    """What the trainer's shelves hold now, from which replicas can be seeded."""
    busy: bool
    """Whether a round is running."""
    trainer_world_size: int
    trainer: tuple[RankStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    rounds: tuple[RoundResult, ...]
    """Rounds that ended, the newest last."""
    epoch: int = FIRST_EPOCH
    """The latest epoch in which a version is known to have been published."""
    now: float = 0.0
    """When this was taken, seconds since the epoch, by the coordinator's clock."""


class ReplicaGauges(msgspec.Struct, frozen=True):
    """What metrics say of a replica: see :class:`ReplicaStatus`."""

    name: str
    state: str
    version: int | None
    staleness: int | None
    phases: dict[str, float]
    since: float


class Gauges(msgspec.Struct, frozen=True):
    """What metrics say of a coordinator: see :class:`Status`, of which this is the part that costs little."""

    run: str
    last: int
    busy: bool
    trainer: tuple[str, ...]
    epoch: int
    missed: int
    """Replicas that did not get the version of the last round."""
    replicas: tuple[ReplicaGauges, ...]
