"""Result of a round and of each replica in it, recorded while the round runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import structs

from weightsync.config import Require
from weightsync.coordinator.events import ReplicaEnded, ReplicaPhase, Watcher
from weightsync.coordinator.negotiation import TransferPlan
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.replicas import Replica
from weightsync.errors import readable, to_wire
from weightsync.model import SERVICE, Version
from weightsync.protocol.messages import Moved, ReplicaResult, RoundResult
from weightsync.spans import span

_ERROR_BYTES, _ERRORS_BYTES, _LEAST = 4200, 1 << 20, 200
_PHASES = ("agree", "stage", "wait", "drain", "pause", "move", "verify", "commit")


class Report:
    """Record of one replica in one round: seconds by phase, bytes, error."""

    def __init__(self, replica: Replica, number: int, emit: Watcher) -> None:
        self.replica = replica
        self.agreement: TransferPlan | None = None
        self.moved: Mapping[str, Moved] = {}
        self.source = ""
        """From whom the replica reads."""
        self.base: Version | None = None
        """The version whose changed words alone move; ``None`` if all bytes do."""
        self._round = number
        self._emit = emit
        self.phases: dict[str, float] = {}
        """Seconds of each phase that has ended."""
        self._current = ""
        self._failed_in = ""
        self.error: str | None = None
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def enter(self, phase: str) -> None:
        """Start a phase and notify watchers."""
        self._current = phase
        if phase == "move" and self.agreement is not None:
            self.replica.received, self.replica.expected = {}, self.agreement.nbytes
        self._emit(ReplicaPhase(self._round, self.replica.name, phase))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the phase ``name``, whether it succeeds or fails."""
        self.enter(name)
        started = asyncio.get_running_loop().time()
        try:
            with span(name, self.replica.name):
                yield
        except BaseException:
            self._failed_in = name
            raise
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + asyncio.get_running_loop().time() - started

    def paused(self) -> None:
        """Record that the replica is told to pause."""
        self._paused_at = asyncio.get_running_loop().time()

    def moved_with(self, others: Mapping[str, float]) -> None:
        """Attribute part of the duration of the move call to other phases, limited to the duration that was measured here."""
        for name, seconds in others.items():
            seconds = min(max(0.0, seconds), self.phases["move"])
            self.phases[name] = seconds
            self.phases["move"] -= seconds

    def resumed(self) -> None:
        """Record that the replica generates again."""
        if self._paused_at is not None:
            self._paused_seconds = asyncio.get_running_loop().time() - self._paused_at
            self._paused_at = None

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the update."""
        kind, message = to_wire(error)
        self.error = f"{self._failed_in or self._current}: {kind}: {message}"

    def result(self, publications: Publications) -> ReplicaResult:
        """End the report and return its result. The pause of a replica that was not resumed counts up to now."""
        self.resumed()
        replica, agreement = self.replica, self.agreement
        phases = {name: self.phases[name] for name in _PHASES if name in self.phases}
        replica.phases = phases
        replica.error = self.error or replica.error
        replica.received, replica.expected = {}, 0
        replica.paused_seconds = self._paused_seconds
        version = replica.version
        verified = {answer.verified for answer in self.moved.values()}
        measured = sum(phases.values())  # more than that, no part of it can have taken
        result = ReplicaResult(
            name=replica.name,
            state=replica.state,
            version=None if version is None else version.number,
            digest=None if version is None else version.digest,
            nbytes=sum(answer.nbytes for answer in self.moved.values()),
            delivery=agreement.delivery if agreement else "",
            delivery_reason=agreement.reason if agreement else "",
            transports=tuple(sorted({name for link in replica.links.values() for name in link.transports})),
            verified="" if self.error or not verified else "installed" if verified == {"installed"} else "received",
            phases=dict(phases),
            paused_seconds=self._paused_seconds,
            error=self.error,
            parts={
                part: min(max(0.0, *(getattr(answer, f"{part}_seconds") for answer in self.moved.values())), measured)
                for part in ("receive", "load", "digest")
                if self.moved
            },
            epoch=None if version is None else version.epoch,
            source=self.source,
            staleness=publications.behind(version),
            service=SERVICE.get(replica.state, replica.state),
            base=None if self.base is None or self.error else self.base.number,
        )
        replica.verified = result.verified
        self._emit(ReplicaEnded(self._round, result))
        return result


def left_out(replica: Replica) -> ReplicaResult:
    """Result of a replica that the round could not take in, or need not, because it serves the version."""
    error, version = replica.refusal, replica.version
    if replica.state == "lost" or (error is None and version is None):
        error = f"PeerLost: not connected ({replica.error})"
    result = ReplicaResult(
        name=replica.name, state=replica.shown_state, version=None, digest=None, nbytes=0, delivery="", transports=(),
        verified="", phases={}, paused_seconds=0.0, error=error, service=SERVICE.get(replica.shown_state, replica.shown_state),
    )  # fmt: skip
    if error is not None or version is None:
        return result
    return structs.replace(
        result, version=version.number, digest=version.digest, epoch=version.epoch, verified=replica.verified, staleness=0
    )


def shortfall(require: Require, results: Sequence[ReplicaResult]) -> str | None:
    """Explain why the results do not satisfy ``require``; ``None`` if they do.

    Every known replica counts, including those that could not take part, but not those that were closed on purpose. No replica at
    all satisfies neither "all" nor "any".
    """
    good = sum(result.error is None for result in results)
    wanted = max(1, len(results)) if require == "all" else 1 if require == "any" else require
    if good >= wanted:
        return None
    if not results:
        return f"no replica took part, but {wanted} must (has an engine joined? trainer.wait_for_replicas(1) waits for one)"
    failed = "; ".join(f"{result.name}: {result.error}" for result in results if result.error is not None)
    return f"{good} of {len(results)} replicas got the version, but {wanted} must: {failed}"


def round_result(
    number: int,
    version: Version,
    require: Require,
    replicas: Sequence[ReplicaResult],
    place_seconds: float,
    seconds: float,
    step: int | None = None,
    changed: float | None = None,
) -> RoundResult:
    """Combine the results of all replicas into the result of the round."""
    error = shortfall(require, replicas)
    failed = sum(result.error is not None for result in replicas)
    if failed * _ERROR_BYTES > _ERRORS_BYTES:  # bounded, because the result is kept and sent to every trainer rank
        most = max(_ERRORS_BYTES // failed, _LEAST)
        replicas = [structs.replace(replica, error=replica.error and readable(replica.error, most)) for replica in replicas]
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
        step=step,
        changed=changed,
    )
