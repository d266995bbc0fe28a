"""Conversion of ranks and replicas to :mod:`weightsync.coordinator.status`."""

from __future__ import annotations

from typing import Any

from weightsync.coordinator.publications import Publications
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.status import RankStatus, ReplicaGauges, ReplicaStatus
from weightsync.model import SERVICE

__all__ = ["rank_status", "replica_gauges", "replica_status"]


def rank_status(link: RankHandle[Any]) -> RankStatus:
    """Status of a rank."""
    rank = link.rank
    return RankStatus(rank.member, rank.hello.rank, rank.hello.host.name, rank.hello.pid)


def replica_gauges(replica: Replica, publications: Publications) -> ReplicaGauges:
    """Metrics of a replica."""
    version = replica.version
    return ReplicaGauges(
        replica.name, replica.shown_state, None if version is None else version.number, publications.behind(version),
        replica.since,
    )  # fmt: skip


def replica_status(replica: Replica, publications: Publications) -> ReplicaStatus:
    """Status of a replica."""
    version = replica.version
    return ReplicaStatus(
        name=replica.name,
        state=replica.shown_state,
        routable=replica.routable,
        version=None if version is None else version.number,
        digest=None if version is None else version.digest,
        staleness=None if version is None else publications.behind(version),
        since=replica.since,
        world_size=replica.world_size,
        missing=tuple(replica.missing),
        ranks=tuple(rank_status(link) for _, link in sorted(replica.links.items())),
        adapter=next((link.rank.hello.adapter for link in replica.links.values()), ""),
        error=None if replica.shown_state == "left" else replica.error,
        phases=dict(replica.phases),
        epoch=None if version is None else version.epoch,
        service=SERVICE.get(replica.shown_state, replica.shown_state),
    )
