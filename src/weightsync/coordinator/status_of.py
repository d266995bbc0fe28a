"""Conversion of ranks and replicas to :mod:`weightsync.coordinator.status`."""

from __future__ import annotations

from weightsync.coordinator.publications import Publications
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.status import ReplicaGauges, ReplicaStatus
from weightsync.model import SERVICE


def replica_gauges(replica: Replica, publications: Publications) -> ReplicaGauges:
    """Metrics of a replica."""
    number = None if replica.version is None else replica.version.number
    return ReplicaGauges(replica.name, replica.shown_state, number, publications.behind(replica.version), replica.since)


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
        ranks=tuple(link.status() for _, link in sorted(replica.links.items())),
        adapter=next((link.rank.hello.adapter for link in replica.links.values()), ""),
        error=replica.shown_error,
        phases=dict(replica.phases),
        epoch=None if version is None else version.epoch,
        service=SERVICE.get(replica.shown_state, replica.shown_state),
        gone=tuple(rank for _, rank in sorted(replica.gone.items())),
        verified=replica.verified if version is not None else "",
        paused_seconds=replica.paused_seconds,
        url=replica.url,
        restless=replica.restless,
    )
