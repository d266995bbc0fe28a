"""Results of a round: for each replica, and overall."""

from __future__ import annotations

import msgspec

from weightsync.model.version import Version

__all__ = ["GUARANTEES", "ReplicaResult", "RoundResult"]

_SHOWN, _LINE = 8, 320  # items, and characters of each, in a summary

GUARANTEES = {
    "installed": "the digests of the engine's own parameters equal the published ones",
    "received": "weaker: the digests compared are of the tensors passed to the engine's loader, not of the result of loading",
}
"""Meaning of :attr:`ReplicaResult.verified`."""


class ReplicaResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one replica in one round.

    ``state`` is the replica's state after the round. A replica that the round could not take in is ``refused`` (its tensors differ
    from the trainer's), ``lost`` (a rank's connection is gone) or ``registered`` (ranks have not joined); ``error`` says why.
    """

    name: str
    state: str
    version: int | None
    digest: str | None
    nbytes: int
    delivery: str
    transports: tuple[str, ...]
    verified: str
    """``installed``, ``received`` or empty, see :data:`GUARANTEES`."""
    phases: dict[str, float]
    """Seconds by phase: agree, wait, pause, move, verify, commit."""
    paused_seconds: float
    error: str | None = None
    parts: dict[str, float] = {}
    """Seconds within the move: receive, load, digest, each of the slowest rank. Parts overlap, so they need not add up."""
    delivery_reason: str = ""
    """Why this delivery was chosen."""
    epoch: int | None = None
    """Epoch of ``version``."""

    @property
    def guarantee(self) -> str:
        """Meaning of ``verified`` as a sentence; empty if nothing was verified."""
        return GUARANTEES.get(self.verified, "")


class RoundResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one attempt to bring replicas to a version. ``str()`` gives a summary of three lines."""

    round: int
    version: Version
    ok: bool
    nbytes: int
    seconds: float
    phases: dict[str, float]
    """Seconds by phase common to all replicas: agree, place."""
    replicas: tuple[ReplicaResult, ...]
    error: str | None = None
    ended: float = 0.0
    """Time of the end by the coordinator's clock, in seconds since the Unix epoch; for display."""
    step: int | None = None
    """The training framework's own count, as it was given to ``publish_stream``."""

    def __str__(self) -> str:
        good = [failed_replica for failed_replica in self.replicas if failed_replica.error is None]
        bad = [failed_replica for failed_replica in self.replicas if failed_replica.error is not None]
        verified = [
            f"{', '.join(_shown(names))} ({kind}: {meaning})"
            for kind, meaning in GUARANTEES.items()
            if (names := [failed_replica.name for failed_replica in good if failed_replica.verified == kind])
        ]
        failed = _shown(
            [f"{failed_replica.name} ({failed_replica.state}: {_one_line(failed_replica.error)})" for failed_replica in bad]
        )
        return "\n".join(
            (
                f"round {self.round}, version {self.version}: {'ok' if self.ok else 'failed'}, {len(good)} of {len(self.replicas)} "
                f"replicas, {self.nbytes / 1e6:,.1f} MB in {self.seconds:.3f} s",
                f"  updated: {'; '.join(verified) or 'none'}",
                f"  not updated: {'; '.join(failed) or 'none'}",
            )
        )


def _shown(items: list[str]) -> list[str]:
    return items if len(items) <= _SHOWN else [*items[:_SHOWN], f"and {len(items) - _SHOWN} more"]


def _one_line(text: str | None) -> str:
    lines = [" ".join(line.split()) for line in (text or "").splitlines()]
    line = "; ".join(filter(None, lines)).replace(":; ", ": ")
    return line if len(line) <= _LINE else line[: _LINE - 3] + "..."
