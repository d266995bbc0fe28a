"""What replicas say that they serve, against what was published under that number."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.coordinator.replicas import Replica
from weightsync.model import Version

__all__ = ["attested", "weigh"]


def attested(replica: Replica, run: str) -> Version | None:
    """The version of ``run`` that all ranks of a replica report, none of which a round has touched since."""
    reported = {link.serving for link in replica.links.values()}
    version = reported.pop() if len(reported) == 1 else None
    if version is None or not replica.complete or replica.state not in ("registered", "loaded"):
        return None
    return version if version.run == run and version.manifest == replica.manifest.fingerprint else None


def weigh(replicas: Iterable[Replica], run: str, order: tuple[int, int], published: Version | None) -> list[tuple[Replica, str]]:
    """Load the replicas that report what was ``published``, the version of this epoch and number; return the others, and why.

    One replica that claims another digest must not take the others out of service. While nobody knows what was published, replicas
    that differ are neither believed nor paused; the trainer's ranks decide when they are back, or publish the next version.
    """
    found = [(replica, version) for replica in replicas if (version := attested(replica, run))]
    reports = [(replica, version) for replica, version in found if version.order == order]
    if published is None and len({version for _, version in reports}) > 1:
        for replica, version in reports:
            replica.doubt(f"replicas report version {version} with different digests, and no trainer has said which is right")
        return []
    wrong = []
    for replica, version in reports:
        if published is not None and version != published:
            wrong.append((replica, f"version {version} was published with another digest than {version.digest}"))
        elif replica.state == "registered":
            replica.become("loaded", version)
    return wrong
