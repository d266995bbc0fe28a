"""Log of rounds in engine and trainer processes: versions, durations and verification at INFO, failures at WARNING."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.errors import LoadError, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import (
    Body,
    Commit,
    Move,
    Moved,
    Pause,
    Prepare,
    Quarantine,
    Resume,
    RoundResult,
    Update,
    Updated,
)
from weightsync.protocol.worker import Received

__all__ = ["LoggedCalls", "MissedReplicas", "log_result", "size"]

_log = logging.getLogger("weightsync.rounds")

_MIB = 1 << 20
_STEPS: dict[type, str] = {
    Prepare: "preparing", Pause: "pausing", Move: "moving", Commit: "committing", Resume: "resuming", Update: "updating",
    Quarantine: "staying paused",
}  # fmt: skip


def size(nbytes: float) -> str:
    """Format a byte count for display: ``16 B``, ``12.5 MiB``, ``1.2 GiB``."""
    for unit, many in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", 1 << 10)):
        if nbytes >= many:
            return f"{nbytes / many:.1f} {unit}"
    return f"{nbytes:.0f} B"


class LoggedCalls:
    """Wraps ``receive`` of an engine rank, so that each call of the coordinator is logged after it ran."""

    def __init__(self, member: str, receive: Callable[[Body], Received]) -> None:
        self._member, self._receive = member, receive
        self._delivery = ""
        self._started = 0.0
        self._moved: Moved | None = None
        self._version: Version | None = None
        self._warned = False

    def __call__(self, body: Body) -> Received:
        """Receive a call."""
        return _LoggedCall(self, body, self._receive(body))

    def run(self, body: Body, call: Received, timeout: float) -> Body:
        """Run a received call and log its outcome."""
        if isinstance(body, Prepare):
            self._delivery = body.plan.delivery
        elif isinstance(body, Pause | Update):
            self._started = time.monotonic()
        try:
            answer = call.run(timeout)
        except Exception as error:
            step, kind = _STEPS.get(type(body), "a call"), type(error).__name__
            _log.warning("%s: %s failed: %s: %s", self._member, step, kind, error, exc_info=_of_engine(error))
            raise
        self._note(body, answer)
        return answer

    def _note(self, body: Body, answer: Body) -> None:
        match body, answer:
            case Quarantine(), _:
                _log.warning("%s is paused and serves no version: %s", self._member, body.reason)
            case Move(), Moved():
                self._moved = answer
            case Commit(), _:
                self._version = body.version
            case Resume(), _ if self._moved is not None and self._version is not None:
                self._loaded(self._version, self._moved)
            case Update(), Updated() if answer.committed:
                self._loaded(body.version, answer.moved)
            case Update(), _:
                _log.warning(
                    "%s: the installed bytes of %s do not match its digest; the engine stays paused", self._member, body.version
                )
            case _:
                pass

    def _loaded(self, version: Version, moved: Moved) -> None:
        _log.info(
            "%s serves %s after %.1f ms: %s %s, verified as %s",
            self._member, version, 1000 * (time.monotonic() - self._started), size(moved.nbytes), self._delivery, moved.verified,
        )  # fmt: skip
        if moved.verified == "received" and not self._warned:
            self._warned = True
            _log.warning(
                "%s: verified as received: the digests cover the tensors passed to load(), so a loader that drops or changes a "
                "tensor goes unnoticed. An adapter with shards(), such as weightsync.ModuleAdapter, verifies the parameters",
                self._member,
            )


@dataclass(frozen=True)
class _LoggedCall:
    log: LoggedCalls
    body: Body
    call: Received

    @property
    def patience(self) -> float:
        return self.call.patience

    def run(self, timeout: float) -> Body:
        return self.log.run(self.body, self.call, timeout)

    def withdraw(self) -> str:
        return self.call.withdraw()


def log_result(member: str, result: RoundResult) -> None:
    """Log the result of a publication."""
    _log.log(
        logging.INFO if result.ok else logging.WARNING,
        "%s: round %d: version %s serves in %d of %d replicas after %.1f ms: %s",
        member, result.round, result.version, len(result.updated), len(result.replicas), 1000 * result.seconds, size(result.nbytes),
    )  # fmt: skip


class MissedReplicas:
    """Warns of the replicas that a publication did not reach, unless they are the same as after the last one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._states: dict[str, str] = {}

    def warn(self, result: RoundResult) -> None:
        """Log the errors of the replicas that ``result`` lists with one."""
        states = {replica.name: replica.state for replica in result.missed}
        if states and states != self._states:
            listed = "; ".join(f"{replica.name} ({replica.state}): {replica.error}" for replica in result.missed)
            self._log.warning("version %s did not reach %s", result.version, listed)
        self._states = states


def _of_engine(error: Exception) -> BaseException | None:
    """Return the exception of the engine's own code, to be logged with its traceback; ``None`` for an error of this library."""
    if isinstance(error, LoadError):
        return error.__cause__
    return None if isinstance(error, WeightSyncError) else error
