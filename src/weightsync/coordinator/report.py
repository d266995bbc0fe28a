"""What became of a replica in a round, and of the round: written down while it happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import structs

from weightsync.config import Require
from weightsync.coordinator.events import ReplicaEnded, ReplicaPhase, Watcher
from weightsync.coordinator.negotiation import Agreement
from weightsync.coordinator.replicas import Replica
from weightsync.errors import readable, to_wire
from weightsync.model import Version
from weightsync.protocol.messages import Moved, ReplicaResult, RoundResult

__all__ = ["Report", "left_out", "round_result", "shortfall"]


_ERROR_BYTES, _ERRORS_BYTES, _LEAST = 4200, 1 << 20, 200
_PHASES = ("agree", "wait", "pause", "move", "verify", "commit")


class Report:
    """One replica in one round: seconds by phase, bytes, error."""

    def __init__(self, replica: Replica, number: int, emit: Watcher) -> None:
        self.replica = replica
        self.agreement: Agreement | None = None
        self.moved: Mapping[str, Moved] = {}
        self._round = number
        self._emit = emit
        self._phases: dict[str, float] = {}
        self._current = ""
        self._error: str | None = None
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def enter(self, phase: str) -> None:
        """Tell watchers."""
        self._current = phase
        if phase == "move" and self.agreement is not None:
            self.replica.received, self.replica.expected = {}, self.agreement.nbytes
        self._emit(ReplicaPhase(self._round, self.replica.name, phase))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time ``name``, also when it fails."""
        self.enter(name)
        started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._phases[name] = asyncio.get_running_loop().time() - started

    def paused(self) -> None:
        """The replica is told to pause."""
        self._paused_at = asyncio.get_running_loop().time()

    def moved_with(self, others: Mapping[str, float]) -> None:
        """The call that moved spent so long in other phases; as much of each as the call took, whatever the rank says."""
        for name, seconds in others.items():
            seconds = min(max(0.0, seconds), self._phases["move"])
            self._phases[name] = seconds
            self._phases["move"] -= seconds

    def resumed(self) -> None:
        """The replica generates again."""
        if self._paused_at is not None:
            self._paused_seconds = asyncio.get_running_loop().time() - self._paused_at
            self._paused_at = None

    def failed(self, error: BaseException) -> None:
        """The attempt ended with this."""
        kind, message = to_wire(error)
        phase = list(self._phases)[-1] if self._phases else self._current
        self._error = f"{phase}: {kind}: {message}"
        self.replica.error = self._error

    def result(self) -> ReplicaResult:
        """The outcome; ends the report. The pause of a replica that was not resumed is counted up to now."""
        self.resumed()
        replica, agreement = self.replica, self.agreement
        phases = {name: self._phases[name] for name in _PHASES if name in self._phases}
        replica.phases = phases
        replica.received, replica.expected = {}, 0
        version = replica.version
        verified = {answer.verified for answer in self.moved.values()}
        result = ReplicaResult(
            name=replica.name,
            state=replica.state,
            version=None if version is None else version.number,
            digest=None if version is None else version.digest,
            nbytes=sum(answer.nbytes for answer in self.moved.values()),
            delivery=agreement.delivery if agreement else "",
            delivery_reason=agreement.reason if agreement else "",
            transports=tuple(sorted({name for link in replica.links.values() for name in link.transports})),
            verified="" if self._error or not verified else "installed" if verified == {"installed"} else "received",
            phases=dict(phases),
            paused_seconds=self._paused_seconds,
            error=self._error,
            parts={
                part: max(getattr(answer, f"{part}_seconds") for answer in self.moved.values())
                for part in ("receive", "load", "digest")
                if self.moved
            },
            epoch=None if version is None else version.epoch,
        )
        self._emit(ReplicaEnded(self._round, result))
        return result


def left_out(replica: Replica) -> ReplicaResult:
    """The result of a replica that a round could not take in."""
    error = replica.refusal
    if replica.state == "lost" or error is None:
        error = f"PeerLost: it is not connected ({replica.error})"
    return ReplicaResult(
        name=replica.name, state=replica.shown_state, version=None, digest=None, nbytes=0, delivery="", transports=(),
        verified="", phases={}, paused_seconds=0.0, error=error,
    )  # fmt: skip


def shortfall(require: Require, results: Sequence[ReplicaResult]) -> str | None:
    """Why these results are not enough, or ``None``. "All" and "any" of no replicas are not enough.

    Every replica that is known counts, also one that could not take part; but not one that was closed on purpose.
    """
    good = sum(result.error is None for result in results)
    wanted = max(1, len(results)) if require == "all" else 1 if require == "any" else require
    if good >= wanted:
        return None
    if not results:
        return f"no replica took part, and {wanted} must (has an engine joined? trainer.wait_for_replicas(1) waits for one)"
    failed = "; ".join(f"{result.name}: {result.error}" for result in results if result.error is not None)
    return f"{good} of {len(results)} replicas got the version, and {wanted} must: {failed}"


def round_result(
    number: int, version: Version, require: Require, replicas: Sequence[ReplicaResult], place_seconds: float, seconds: float
) -> RoundResult:
    """The round's result from its replicas'."""
    error = shortfall(require, replicas)
    failed = sum(result.error is not None for result in replicas)
    if failed * _ERROR_BYTES > _ERRORS_BYTES:  # what all say together is kept, and sent to every rank of the trainer
        most = max(_ERRORS_BYTES // failed, _LEAST)
        replicas = [structs.replace(one, error=one.error and readable(one.error, most)) for one in replicas]
    return RoundResult(
        round=number,
        version=version,
        ok=error is None,
        nbytes=sum(result.nbytes for result in replicas),
        seconds=seconds,
        phases={"agree": max((result.phases.get("agree", 0.0) for result in replicas), default=0.0), "place": place_seconds},
        replicas=tuple(replicas),
        error=error and readable(error),
        ended=time.time(),
    )
