"""Versions that replicas report, checked against the versions that were published."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.coordinator.replicas import Replica
from weightsync.model import Version


def reported_version(replica: Replica, run: str) -> Version | None:
    """Version of ``run`` that all ranks of ``replica`` report; ``None`` if they differ, or if a round has touched a rank since."""
    reported = {link.serving for link in replica.links.values()}
    version = reported.pop() if len(reported) == 1 else None
    if version is None or not replica.complete or replica.state not in ("registered", "loaded"):
        return None
    same = replica.takes_any or version.manifest == replica.manifest.fingerprint
    return version if version.run == run and same else None


def validate(replicas: Iterable[Replica], run: str, order: tuple[int, int], published: Version | None) -> list[tuple[Replica, str]]:
    """Mark replicas that report the ``published`` version as loaded, and return those that report another digest.

    A replica that claims another digest must not take the others out of service. While the published digest is unknown, replicas
    that differ are neither trusted nor paused: the trainer confirms one when it reconnects, or publishes the next version.

    Args:
        replicas: All known replicas.
        run: Name of the run.
        order: Epoch and number of the version in question.
        published: The version published under ``order``; ``None`` if it is unknown.

    Returns:
        Each replica that reports a wrong digest, with the reason.
    """
    reporting = [(replica, version) for replica in replicas if (version := reported_version(replica, run))]
    reports = [(replica, version) for replica, version in reporting if version.order == order]
    if published is None and len({version for _, version in reports}) > 1:
        for replica, version in reports:
            replica.doubt(f"replicas report version {version} with different digests, and the trainer has not confirmed any")
        return []
    wrong = []
    for replica, version in reports:
        if published is not None and version != published:
            wrong.append((replica, f"version {version} was published with a digest other than {version.digest}"))
        elif replica.state == "registered":
            replica.become("loaded", version)
    return wrong
