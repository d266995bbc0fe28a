"""Conversion of ranks and replicas to :mod:`weightsync.coordinator.status`."""

from __future__ import annotations

from typing import Any

from weightsync.coordinator.publications import Publications
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.status import RankStatus, ReplicaGauges, ReplicaStatus

__all__ = ["rank_status", "replica_gauges", "replica_status"]


def rank_status(link: RankHandle[Any]) -> RankStatus:
    """Status of a rank."""
    rank = link.node.rank
    return RankStatus(rank.member, rank.rank, rank.host.name, rank.pid)


def replica_gauges(replica: Replica, publications: Publications) -> ReplicaGauges:
    """Metrics of a replica."""
    return ReplicaGauges(replica.name, replica.shown_state, *_version(replica, publications), replica.phases, replica.since)


def replica_status(replica: Replica, publications: Publications) -> ReplicaStatus:
    """Status of a replica."""
    version = replica.version
    number, staleness = _version(replica, publications)
    return ReplicaStatus(
        name=replica.name,
        state=replica.shown_state,
        routable=replica.routable,
        version=number,
        digest=None if version is None else version.digest,
        staleness=staleness,
        since=replica.since,
        world_size=replica.world_size,
        missing=tuple(replica.missing),
        ranks=tuple(rank_status(link) for _, link in sorted(replica.links.items())),
        adapter=next((link.node.rank.adapter for link in replica.links.values()), ""),
        error=replica.error,
        phases=dict(replica.phases),
        epoch=None if version is None else version.epoch,
    )


def _version(replica: Replica, publications: Publications) -> tuple[int | None, int | None]:
    """Number of the served version, and by how many publications it is behind."""
    version = replica.version
    return (None, None) if version is None else (version.number, publications.behind(version))
