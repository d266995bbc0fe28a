"""The coordinator's state for Prometheus, in its text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weightsync.coordinator.events import RoundEnded
from weightsync.coordinator.status import Gauges

__all__ = ["CONTENT_TYPE", "Totals", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("registered", "loaded", "updating", "dirty", "lost", "refused")


@dataclass
class Totals:
    """What is counted since the coordinator's start."""

    rounds: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    paused_seconds: float = 0.0
    last_success: float | None = None

    def count(self, event: RoundEnded) -> None:
        """Add a round."""
        result = event.result
        self.rounds += 1
        self.failed += result is None or not result.ok
        if result is None:
            return
        self.nbytes += result.nbytes
        self.seconds += result.seconds
        self.paused_seconds += sum(replica.paused_seconds for replica in result.replicas)
        if result.ok:
            self.last_success = result.ended


def exposition(status: Gauges, totals: Totals) -> str:
    """All metrics."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP weightsync_{name} {text}")
        lines.append(f"# TYPE weightsync_{name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"weightsync_{name}{{{inside}}} {value}" if inside else f"weightsync_{name} {value}")

    run = {"run": status.run}
    family(
        "published_version", "gauge", "Highest published version number of the latest epoch, -1 before the first.",
        [(run, status.last)],
    )  # fmt: skip
    family("published_epoch", "gauge", "Latest epoch in which a version was published.", [(run, status.epoch)])
    family("trainer_ranks", "gauge", "Connected trainer ranks.", [(run, len(status.trainer))])
    family("round_running", "gauge", "Whether a round is running.", [(run, int(status.busy))])
    family(
        "replica_state", "gauge", "1 for the state that a replica is in.",
        [({"replica": r.name, "state": state}, int(r.state == state)) for r in status.replicas for state in _STATES],
    )  # fmt: skip
    family(
        "replicas_not_updated", "gauge", "Known replicas that the last round did not update: failed, refused or lost.",
        [(run, status.missed)],
    )  # fmt: skip
    family(
        "replica_version", "gauge", "Version number that a replica serves; absent while it serves none.",
        [({"replica": r.name}, r.version) for r in status.replicas if r.version is not None],
    )  # fmt: skip
    family(
        "replica_staleness", "gauge", "Publications that are newer than what a replica serves.",
        [({"replica": r.name}, r.staleness) for r in status.replicas if r.staleness is not None],
    )  # fmt: skip
    family(
        "replica_phase_seconds", "gauge", "Seconds by phase of a replica's last round.",
        [({"replica": r.name, "phase": phase}, seconds) for r in status.replicas for phase, seconds in r.phases.items()],
    )  # fmt: skip
    family(
        "replica_state_since_timestamp_seconds", "gauge", "When a replica entered its state, seconds since the epoch.",
        [({"replica": r.name}, r.since) for r in status.replicas],
    )  # fmt: skip
    family("rounds_total", "counter", "Rounds that ended.", [(run, totals.rounds)])
    family("rounds_failed_total", "counter", "Rounds that ended without success.", [(run, totals.failed)])
    family("round_seconds_total", "counter", "Seconds that rounds took, added up.", [(run, totals.seconds)])
    family(
        "paused_seconds_total", "counter", "Seconds that replicas were paused for rounds, added up over replicas.",
        [(run, totals.paused_seconds)],
    )  # fmt: skip
    family("moved_bytes_total", "counter", "Bytes that replicas received.", [(run, totals.nbytes)])
    family(
        "last_success_timestamp_seconds", "gauge", "When the last successful round ended; absent before the first.",
        [] if totals.last_success is None else [(run, totals.last_success)],
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
