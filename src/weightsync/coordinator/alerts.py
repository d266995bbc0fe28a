"""Problems of a run and their fixes, from its status: the same list for the status page, the commands and programs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence

from weightsync.coordinator.round_trace import PastRounds
from weightsync.coordinator.status import Alert, RankStatus, ReplicaStatus

_GONE = "disappeared (stopped without close(), killed, crashed, hung or network cut)"
_RESTART = "Restart it. It catches up by itself."
_PUBLISH = "The next publication updates it. To update it now: weightsync update"
_RESTLESS = "Let nothing write to parameters after finish(), and leave buffers that change out of the trainer and of the engine."
_RELAY = (
    "Look at the store, and at the relay's log. It goes on by itself: with the next key frame if an object is damaged. "
    "To have a key frame now, restart the trainer at home."
)
_FIXES = {
    "DeadlineExceeded": "Look at the process that is named, and at its log.",
    "PeerLost": "Restart the process that is named. Its own log says why it ended.",
    "LoadError": "The engine's log has the traceback.",
    "VerificationError": "Publish again. If it recurs, other code writes to the parameters, or memory or network is faulty.",
    "ManifestMismatch": "Correct the engine's model, or the trainer's names and dtypes, and restart the engine.",
    "PlanMismatch": "Restart the engine's process.",
    "TransportUnavailable": "Allow a transport that both sides have.",
    "AuthenticationError": "Give the process the token of this coordinator.",
}
_KIND = re.compile(r"(?:^|: )([A-Z][A-Za-z]+): ")
_SLOW_FACTOR, _SLOW_SECONDS = 3.0, 0.25


def alerts_of(replicas: Sequence[ReplicaStatus], trainer: Sequence[RankStatus], past: PastRounds) -> tuple[Alert, ...]:
    """List the problems, errors first. ``trainer`` are its lost ranks, and those that are connected."""
    alerts = [*_of_trainer(trainer), *(alert for replica in replicas for alert in _of_replica(replica))]
    if past.failure is not None:
        number, error, ended = past.failure
        alerts.append(_alert("update", "failed", f"update failed in round {number}: {error}", ended, error, round=number))
    alerts += _slow(past)
    return tuple(sorted(alerts, key=lambda alert: alert.level))


def _alert(subject: str, kind: str, text: str, since: float, error: str = "", fix: str = "", round: int | None = None) -> Alert:
    named = next((name for name in reversed(_KIND.findall(error)) if name in _FIXES), "")
    # A refusal may end with its own remedy, which knows more.
    text, _, remedy = text.partition("\nto ")
    fix = f"To {remedy}" if remedy else _FIXES.get(named, "") or fix or "See the coordinator's log."
    return Alert("error", subject, kind, text, fix, since, named, round)


def _of_trainer(ranks: Sequence[RankStatus]) -> Iterator[Alert]:
    for rank in ranks:
        if rank.failing is not None and rank.ended is None:
            reason, since = rank.failing
            yield _alert("trainer", "failed", f"{rank.member} relays no newer version: {reason}", since, fix=_RELAY)
    if gone := [rank for rank in ranks if rank.ended is not None]:
        text = f"{', '.join(rank.member for rank in gone)} {_GONE}. {_where(gone)}"
        since = min(rank.ended or 0.0 for rank in gone)
        yield _alert("trainer", "lost", text, since, fix="Restart the trainer. Replicas keep serving their version.")


def _of_replica(replica: ReplicaStatus) -> Iterator[Alert]:
    name, since, error = replica.name, replica.since, replica.error or ""
    if replica.state == "lost":
        ranks = ", ".join(rank.member for rank in replica.gone) or name
        text = f"{ranks} {_GONE}. {_where(replica.gone)}"
        yield _alert(name, "lost", text, since, fix=_RESTART)
    elif replica.state == "refused":
        where = "" if replica.ranks else f" {_where(replica.gone)}"
        yield _alert(name, "refused", f"{name} was refused.{where} {error.partition(': ')[2] or error}", since, error)
    elif replica.state == "dirty":
        yield _alert(name, "out_of_service", f"{name} is out of service: {error or 'its update failed'}", since, error, _PUBLISH)
    elif replica.restless:
        text = f"{name} is not audited: the same parameters were changed again after they had been installed again"
        yield Alert("warning", name, "restless", text, _RESTLESS, since)


def _where(ranks: Sequence[RankStatus]) -> str:
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(str(rank.pid))
    places = (f"process{'es' * (len(pids) > 1)} {', '.join(pids)} on {host}" for host, pids in hosts.items())
    return f"Last seen: {'; '.join(places)}." if hosts else ""


def _slow(past: PastRounds) -> Iterator[Alert]:
    """Replicas whose pause in the last round is several times that of the others."""
    if not past.results:
        return
    last = past.results[-1]
    updated = {replica.name: replica for replica in last.replicas if replica.error is None}
    for name, replica in updated.items():
        others = [other.paused_seconds for other in updated.values() if other is not replica]
        usual = statistics.median(others) if others else replica.paused_seconds
        if replica.paused_seconds > max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS):
            phase, seconds = max(replica.phases.items(), key=lambda item: item[1], default=("pause", replica.paused_seconds))
            if (slowest := last.slowest) is not None and slowest.rank.rpartition("/")[0] == name:
                phase, seconds = slowest.phase, slowest.seconds
            pause = f"paused for {replica.paused_seconds:.2f} s (others: {usual:.2f} s)"
            text = f"{name} is slow: {pause}, {seconds:.2f} s of it in {phase}"
            fix = f"Open round {last.round} to see where the time went."
            yield Alert("warning", name, "slow", text, fix, last.ended, round=last.round)
