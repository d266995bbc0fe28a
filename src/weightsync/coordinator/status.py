"""Snapshot of a coordinator for people and programs."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.model import FIRST_EPOCH, SlowestSpan, Version
from weightsync.protocol.messages import RoundResult


class Alert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem, and how to solve it."""

    level: Literal["error", "warning"]
    subject: str
    """A replica's name, ``trainer``, or ``update``."""
    kind: str
    """``lost``, ``refused``, ``out_of_service``, ``restless``, ``slow`` or ``failed``."""
    text: str
    """What happened. Begins with the subject."""
    fix: str
    since: float
    """Seconds since the Unix epoch."""
    error: str = ""
    """Class name of the error; empty if there is none."""
    round: int | None = None
    """Round in which it happened."""


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that is connected, or was."""

    member: str
    rank: int
    host: str
    pid: int
    """Process id on ``host``."""
    ended: float | None = None
    """Time at which its connection ended, in seconds since the Unix epoch; ``None`` while it is connected."""
    failing: tuple[str, float] | None = None
    """Why a relay has no newer version, and since when, in seconds since the Unix epoch."""


class ReplicaStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica. ``version`` and ``digest`` are ``None`` unless it is serving."""

    name: str
    state: str
    """``refused`` for a connected replica whose tensors differ from the trainer's, ``left`` for one whose ranks were all closed on
    purpose; else see ``weightsync.coordinator.replicas``."""
    routable: bool
    """Whether requests may be sent to the replica. Not while it serves but is about to be paused."""
    version: int | None
    digest: str | None
    staleness: int | None
    """Number of publications that are newer than the served version; ``None`` if no version is served."""
    since: float
    """Time of the last state change, in seconds since the Unix epoch."""
    world_size: int
    missing: tuple[int, ...]
    """First sixteen ranks that are not connected. ``world_size`` and ``ranks`` give their total number."""
    ranks: tuple[RankStatus, ...]
    adapter: str
    error: str | None
    """Why the last update failed."""
    phases: dict[str, float]
    """Seconds by phase of the last round in which the replica took part."""
    epoch: int | None = None
    """Epoch of ``version``."""
    service: str = ""
    """``state`` in other words: ``serving`` for ``loaded``, ``out_of_service`` for ``dirty``."""
    gone: tuple[RankStatus, ...] = ()
    """Missing ranks that were connected before: where they ran, and until when."""
    verified: str = ""
    """How ``version`` was verified: ``installed``, ``received``, or empty if this coordinator did not see its update."""
    paused_seconds: float | None = None
    """Pause of the last update; ``None`` before the first one."""
    url: str = ""
    """Where routers reach it (``WEIGHTSYNC_REPLICA_URL``)."""
    restless: bool = False
    """Whether the same of its parameters were changed again after ``version`` had been installed again: it is not audited."""


class AdapterStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a LoRA adapter, and who serves it."""

    name: str
    version: int
    digest: str
    rank: int
    base: str | None
    """Label of the base weights for which it was published; ``None``: weights that weightsync did not deliver."""
    replicas: tuple[str, ...]
    published: bool = False
    """Whether a trainer that is connected holds the newest version of this name."""


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A coordinator at one moment."""

    run: str
    last: int
    """Highest published version number of the latest known epoch, or -1."""
    version: Version | None
    """Version that the trainer's regions hold now, from which replicas can be seeded."""
    busy: bool
    """Whether a round is running."""
    trainer_world_size: int
    trainer: tuple[RankStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    rounds: tuple[RoundResult, ...]
    """Results of past rounds, newest last."""
    epoch: int = FIRST_EPOCH
    """Latest epoch in which a version is known to have been published."""
    now: float = 0.0
    """Time of the snapshot by the coordinator's clock, in seconds since the Unix epoch."""
    started: float = 0.0
    """Time at which the coordinator started, in seconds since the Unix epoch."""
    release: str = ""
    """Version of weightsync."""
    trainer_expected: int = 0
    """Number of ranks of the trainer that is connected or was the last to be; ``trainer_world_size`` is 0 without one."""
    trainer_gone: tuple[RankStatus, ...] = ()
    """Trainer ranks whose connection ended other than on purpose and that have not come back."""
    alerts: tuple[Alert, ...] = ()
    """Problems, the worst first."""
    stored: Version | None = None
    """Newest version in the store, as far as the coordinator knows."""
    adapters: tuple[AdapterStatus, ...] = ()
    """Versions of LoRA adapters that are served, in the order of names and then of numbers."""


class ReplicaGauges(msgspec.Struct, frozen=True):
    """Metrics of a replica, see :class:`ReplicaStatus`."""

    name: str
    state: str
    version: int | None
    staleness: int
    """Number of publications that are newer than the served version; of all that are known, if no version is served."""
    since: float


class Gauges(msgspec.Struct, frozen=True):
    """Metrics of a coordinator: the part of :class:`Status` that is cheap to compute."""

    run: str
    last: int
    busy: bool
    trainer: tuple[str, ...]
    epoch: int
    missed: int
    """Number of replicas that did not get the version of the last round."""
    replicas: tuple[ReplicaGauges, ...]
    queued: int = 0
    """Number of rounds that wait for the running one."""
    late: int = 0
    """Number of connected replicas that could be seeded and do not serve the version that the trainer holds."""
    slowest: dict[str, SlowestSpan] = {}
    """Slowest rank of the last round by phase."""
    stored: int = -1
    """Number of the newest version in the store; -1 if none is known."""
    relay_failing: bool = False
    """Whether a relay has no newer version because it cannot read or publish it."""
    adapters: tuple[AdapterStatus, ...] = ()
    """As in :class:`Status`: by name, the newest version of each last."""
