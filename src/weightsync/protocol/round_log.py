"""Log of rounds in engine and trainer processes: versions, durations and verification at INFO, failures at WARNING."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from msgspec import structs

from weightsync.errors import LoadError, VerificationError, WeightSyncError, few
from weightsync.model import Version, in_words
from weightsync.protocol.messages import (
    Audit,
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
from weightsync.protocol.worker import IncomingCall

_log = logging.getLogger("weightsync.rounds")

_STEPS: dict[type, str] = {
    Prepare: "preparing", Pause: "pausing", Move: "moving", Commit: "committing", Resume: "resuming", Update: "updating",
    Quarantine: "staying paused", Audit: "reading its weights again",
}  # fmt: skip


def size(nbytes: float) -> str:
    """Format a byte count for display, as rates and vendors of links count: ``16 B``, ``12.5 MB``, ``1.2 GB``."""
    for unit, many in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= many:
            return f"{nbytes / many:.1f} {unit}"
    return f"{nbytes:.0f} B"


class LoggedCalls:
    """Wraps ``receive`` of an engine rank, so that each call of the coordinator is logged after it ran.

    ``hands_over`` says that the rank passes tensors on to a loader that is not its own, for which no adapter can have shards.
    """

    def __init__(self, member: str, receive: Callable[[Body], IncomingCall], *, hands_over: bool = False) -> None:
        self._member, self._receive = member, receive
        self._delivery = ""
        self._started = 0.0
        self._moved: Moved | None = None
        self._version: Version | None = None
        self._warned = hands_over

    def __call__(self, body: Body) -> IncomingCall:
        """Receive a call."""
        call = self._receive(body)
        return replace(call, run=partial(self._run, call))

    def _run(self, call: IncomingCall, timeout: float) -> Body:
        body = call.body
        if isinstance(body, Prepare):
            self._delivery = body.plan.delivery
        elif isinstance(body, Pause | Update):
            self._started = time.monotonic()
        try:
            answer = call.run(timeout)
        except Exception as error:
            # Most engines cannot be audited, or not now: that is no news.
            level = logging.DEBUG if isinstance(body, Audit) and not isinstance(error, VerificationError) else logging.WARNING
            step, kind = _STEPS.get(type(body), "a call"), type(error).__name__
            # As text: a handler that keeps records would keep what the error's traceback refers to, such as mapped memory.
            _log.log(level, "%s: %s failed: %s: %s", self._member, step, kind, str(error), exc_info=_of_engine(error))
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

    def _loaded(self, version: Version, moved: Moved) -> None:
        _log.info(
            "%s serves %s after %.1f ms: %s %s, verified as %s",
            self._member, version, 1000 * (time.monotonic() - self._started), size(moved.nbytes), self._delivery, moved.verified,
        )  # fmt: skip
        if moved.verified == "received" and not self._warned:
            self._warned = True
            _log.warning(
                "%s: verified as received: the digests cover what the engine was given, so a loader that drops or changes a "
                "tensor goes unnoticed. The delivery_reason in the round's result says why",
                self._member,
            )


def describe(result: RoundResult) -> str:
    """Describe the result of a publication in one line: version, replicas that serve it, verification, time, bytes."""
    updated = [replica for replica in result.replicas if replica.error is None]
    names = few((replica.name for replica in updated), 4)
    verified = " or ".join(sorted({replica.verified for replica in updated if replica.verified}))
    total, took = len(result.replicas), 1000 * result.seconds
    return (
        f"round {result.round}: version {result.version} serves in {len(updated)} of {total} replicas"
        f"{names and f' ({names})'} after {took:.1f} ms: {size(result.nbytes)}{verified and f', verified as {verified}'}"
    )


def log_result(member: str, result: RoundResult) -> None:
    """Log the result of a publication."""
    _log.log(logging.INFO if result.ok else logging.WARNING, "%s: %s", member, describe(result))


class MissedReplicas:
    """Warns of the replicas that a publication did not reach, unless they are the same as after the last one.

    They are not if one is in another state, or failed in another phase or by another kind of error.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._states: dict[str, tuple[str, ...]] = {}
        self._first: dict[tuple[str, str | None], int] = {}  # replica and error: the round that had it first

    def warn(self, result: RoundResult) -> RoundResult:
        """Log the errors of the replicas that ``result`` lists with one. Return it with ``since`` for those that recur."""
        states = {each.name: (each.state, *(each.error or "").split(": ", 2)[:2]) for each in result.missed}
        if states and states != self._states:
            listed = "; ".join(f"{replica.name} ({in_words(replica.state)}): {replica.error}" for replica in result.missed)
            self._log.warning("version %s did not reach %s", result.version, listed)
        self._states = states
        earlier = {failure: number for failure, number in self._first.items() if number < result.round}
        replicas = [structs.replace(replica, since=earlier.get((replica.name, replica.error))) for replica in result.replicas]
        failed = (replica for replica in replicas if replica.error)
        self._first = {(replica.name, replica.error): replica.since or result.round for replica in failed}
        return structs.replace(result, replicas=tuple(replicas))


def _of_engine(error: Exception) -> BaseException | None:
    """Return the exception of the engine's own code, to be logged with its traceback; ``None`` for an error of this library."""
    if isinstance(error, LoadError):
        return error.__cause__
    return None if isinstance(error, WeightSyncError) else error
