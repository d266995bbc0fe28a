"""Results of a round: for each replica, and overall."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.errors import few
from weightsync.model.trace import SlowestSpan, milliseconds
from weightsync.model.version import Version
from weightsync.spans import Clock, Seconds

_SHOWN, _LINE = 8, 320  # items, and characters of each, in a summary
_MEGABYTE = 10**6

GUARANTEES = {
    "installed": "the digests of the engine's own parameters equal the published ones",
    "received": "weaker: the digests compared are of what the engine was given, not of what its loading or repacking made of it",
}
"""Meaning of :attr:`ReplicaResult.verified`."""

SERVICE = {"loaded": "serving", "dirty": "out_of_service"}
"""Words of ``service`` for those of ``state`` that differ. The next release gives ``state`` these words."""


def in_words(state: str) -> str:
    """A state as messages name it: ``out of service`` for ``dirty``."""
    return SERVICE.get(state, state).replace("_", " ")


class ReplicaResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one replica in one round.

    ``state`` is the replica's state after the round, and ``service`` the same in other words: ``serving`` for ``loaded``,
    ``out_of_service`` for ``dirty``. A replica that the round could not take in is ``refused`` (its tensors
    differ from the trainer's), ``lost`` (a rank's connection is gone) or ``registered`` (ranks have not joined). ``error`` holds
    the reason.
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
    phases: dict[str, Seconds]
    """Seconds by phase: agree, stage, wait, pause, move, verify, commit."""
    paused_seconds: Seconds
    error: str | None = None
    parts: dict[str, Seconds] = {}
    """Seconds within the move: receive, load, digest, each of the slowest rank. Parts overlap, so they need not add up."""
    delivery_reason: str = ""
    """Why this delivery was chosen."""
    epoch: int | None = None
    """Epoch of ``version``."""
    staleness: int = 0
    """Publications that are newer than ``version``; all that are known, if no version is served."""
    source: str = ""
    """Who fed it: ``trainer``, ``store``, or the name of a replica that serves its weights to others."""
    service: str = ""
    base: int | None = None
    """Number of the version whose changed words alone crossed; ``None`` if all bytes did."""
    since: int | None = None
    """Earlier round since which each result that this trainer got had the same ``error`` for this replica."""

    @property
    def guarantee(self) -> str:
        """Meaning of ``verified`` as a sentence; empty if nothing was verified."""
        return GUARANTEES.get(self.verified, "")


class RoundResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one attempt to bring replicas to a version.

    ``str()`` gives a summary of three lines. It has the error of a replica only if the result before had another one.
    """

    round: int
    version: Version
    ok: bool
    nbytes: int
    seconds: Seconds
    phases: dict[str, Seconds]
    """Seconds by phase common to all replicas: agree, place."""
    replicas: tuple[ReplicaResult, ...]
    error: str | None = None
    ended: Clock = 0.0
    """Time of the end by the coordinator's clock, in seconds since the Unix epoch; for display."""
    step: int | None = None
    """Step count of the training framework, as passed to ``publish`` or ``publish_stream``."""
    slowest: SlowestSpan | None = None
    """Longest phase of any rank, and that rank; ``None`` if the round was not traced."""
    transports: dict[str, int] = {}
    """Bytes read by each transport; empty if the round was not traced."""
    changed: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """The part of all words that differ from the version before; ``None`` where the trainer does not list them."""

    @property
    def updated(self) -> tuple[ReplicaResult, ...]:
        """Replicas that installed the version."""
        return tuple(replica for replica in self.replicas if replica.error is None)

    @property
    def missed(self) -> tuple[ReplicaResult, ...]:
        """Replicas that did not install the version. Their ``error`` holds the reason."""
        return tuple(replica for replica in self.replicas if replica.error is not None)

    @property
    def longest_pause(self) -> float:
        """Longest pause of a replica in seconds."""
        return max((replica.paused_seconds for replica in self.replicas), default=0.0)

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of the round in GB/s (10^9): bytes received by all replicas per second of the round."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def summary(self) -> dict[str, float]:
        """Return the numbers of the round for an experiment's log (W&B, TensorBoard).

        ``staleness_max`` is the staleness of the replica that is furthest behind after the round.
        """
        return {
            "weightsync/update_s": self.seconds,
            "weightsync/pause_s": self.longest_pause,
            "weightsync/place_s": self.phases.get("place", 0.0),
            "weightsync/bytes": float(self.nbytes),
            "weightsync/gb_per_s": self.gigabytes_per_second,
            "weightsync/staleness_max": float(max((replica.staleness for replica in self.replicas), default=0)),
            "weightsync/replicas_ok": float(len(self.updated)),
            "weightsync/replicas_failed": float(len(self.missed)),
            **({} if self.changed is None else {"weightsync/changed_share": self.changed}),
        }

    def __str__(self) -> str:
        updated = self.updated
        verified = [
            f"{few(names, _SHOWN)} ({kind}: {meaning})"
            for kind, meaning in GUARANTEES.items()
            if (names := [replica.name for replica in updated if replica.verified == kind])
        ]
        failed = few(map(_failure, self.missed), _SHOWN, "; ")
        changed = "" if self.changed is None else f" ({100 * self.changed:.3g} % of the words changed)"
        bases = sorted({replica.base for replica in updated if replica.base is not None})
        since = f" of changes since version {few(map(str, bases), _SHOWN)}" if bases else ""
        rate = f" ({self.gigabytes_per_second:.2f} GB/s)" if self.nbytes >= _MEGABYTE else ""
        return "\n".join(
            (
                f"round {self.round}, version {self.version}{changed}: {'ok' if self.ok else 'failed'}, {len(updated)} of "
                f"{len(self.replicas)} replicas, {_size(self.nbytes)}{since} in {self.seconds:.3f} s{rate}, "
                f"longest pause {milliseconds(self.longest_pause)}{f', slowest: {self.slowest}' if self.slowest else ''}",
                f"  updated: {'; '.join(verified) or 'none'}",
                f"  not updated: {failed or 'none'}",
            )
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / _MEGABYTE:,.1f} MB" if nbytes >= _MEGABYTE else f"{nbytes:,} bytes"


def _failure(replica: ReplicaResult) -> str:
    lines = [" ".join(line.split()) for line in (replica.error or "").splitlines()]
    error = "; ".join(filter(None, lines)).replace(":; ", ": ")
    reason = f": {error if len(error) <= _LINE else error[: _LINE - 3] + '...'}"
    return f"{replica.name} ({in_words(replica.state)}{reason if replica.since is None else f' since round {replica.since}'})"
