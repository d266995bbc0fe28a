"""What a run of the demo amounts to: one object for machines, one verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from examples.demo.records import Order
from examples.demo.reports import Adapted
from examples.demo.settings import KILLED, RATE, Settings
from weightsync.coordinator.status import Status
from weightsync.model.lora import adapter_label
from weightsync.protocol.messages import RoundResult

if TYPE_CHECKING:
    from examples.demo.checking import Findings

__all__ = ["Kill", "KillOutcome", "Outcome", "Record", "ReplicaOutcome", "outcome_of"]


class ReplicaOutcome(msgspec.Struct, frozen=True):
    """Where a replica ended."""

    name: str
    state: str
    version: int | None
    digest: str | None


class KillOutcome(msgspec.Struct, frozen=True):
    """A process that was killed in the middle of a round."""

    process: str
    pid: int
    round: int
    version: str
    """The version of that round: a number, with its epoch before it (``2@3``) after the first epoch."""
    seconds: float | None
    """From the kill until every replica served a version again; ``None`` if that never came."""
    back_at: str | None
    """That version."""


class ChangeOutcome(msgspec.Struct, frozen=True):
    """A version, of which only changed words went to all replicas but the last, and all bytes to that one."""

    version: int
    changed: float | None
    """The part of the words that changed; ``None`` for the first version."""
    bytes: int
    paused_ms: float
    dense_bytes: int
    dense_paused_ms: float


class AdaptersOutcome(msgspec.Struct, frozen=True):
    """What became of the adapters."""

    names: int
    versions: int
    """Versions that were published, of all names."""
    answers: int
    """Answers to requests that named an adapter."""
    wrong_answers: int
    """Of those, answers by another version than was asked for, or that the version does not explain."""
    failed_requests: int
    """Requests that failed, with an adapter or without."""
    longest_publish_ms: float
    resident_mib: tuple[int, ...]
    """Memory of all replicas together, in units of 1024² bytes, after each version of the base and of all adapters. Linux only."""


class Outcome(msgspec.Struct, frozen=True):
    """The last line of ``make demo ARGS=--json``, with these keys and no others."""

    ok: bool
    engine: str
    delivery: str
    transport: str
    trainer_ranks: int
    versions: int
    """Versions that were published."""
    bytes_per_version: int
    """Bytes of one version in one replica."""
    requests_served: int
    responses_checked: int
    torn_responses: int
    mislabelled_responses: int
    replicas: tuple[ReplicaOutcome, ...]
    trainer_digest: str | None
    """Digest of the last version."""
    tokens_match: bool
    """Whether after every version every replica answered the probes as that version's checkpoint does."""
    pause_ms_p50: float | None
    seconds: float
    kills: int
    """Processes that were killed."""
    recoveries: int
    """Of those, how many were started again until every replica served a version after it."""
    requests_interrupted: int
    """Requests that a killed replica was running."""
    killed: tuple[KillOutcome, ...]
    joined: ReplicaOutcome | None
    """The replica that joined from the store when the trainer was gone; ``None`` without ``--kill-trainer``."""
    changes: tuple[ChangeOutcome, ...]
    """With ``--deltas``, of each version after the first."""
    adapters: AdaptersOutcome | None
    """With ``--adapters``."""


@dataclass
class Kill:
    """See :class:`KillOutcome`."""

    process: str
    pid: int
    round: int
    version: str
    seconds: float | None = None
    back_at: str | None = None


@dataclass
class Record:
    """What was seen during a run."""

    results: dict[Order, RoundResult] = field(default_factory=dict)
    """The round that published each version."""
    losses: list[float] = field(default_factory=list)
    refused_unseeded: bool | None = None
    """Whether replicas refused to serve their scrambled weights; ``None`` if they were not asked."""
    served: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Requests that were not answered as they should have been, by kind."""
    final: Status | None = None
    failure: str | None = None
    """What ended the run before its time."""
    wrong: list[str] = field(default_factory=list)
    """Why the run is not ok, for people; filled by :func:`outcome_of`."""
    unpublished: list[Order] = field(default_factory=list)
    """Versions whose round failed, and which the trainer did not repeat."""
    served_digests: set[tuple[str, str | None]] = field(default_factory=set)
    """Replicas, and digests of what they served at any time."""
    adapters: list[Adapted] = field(default_factory=list)
    """Versions of adapters that were published."""
    resident: list[int] = field(default_factory=list)
    """See :class:`AdaptersOutcome`."""
    kills: list[Kill] = field(default_factory=list)
    interrupted: int = 0
    """Requests that were running in a replica when it was killed."""
    joined: str | None = None
    """The replica that joined when the trainer was gone."""


def outcome_of(settings: Settings, replicas: Sequence[str], record: Record, findings: Findings | None, seconds: float) -> Outcome:
    """Sum up; everything that must hold and does not is added to ``record.wrong``, and makes the outcome not ``ok``."""
    results = [record.results[number] for number in sorted(record.results)]
    parts = [replica for result in results for replica in result.replicas]
    last = results[-1].version if results else None
    states = {} if record.final is None else {found.name: found for found in record.final.replicas}

    def end_of(name: str) -> ReplicaOutcome:
        state = states.get(name)
        return (
            ReplicaOutcome(name, "unknown", None, None)
            if state is None
            else ReplicaOutcome(name, state.state, state.version, state.digest)
        )

    ends = tuple(end_of(name) for name in replicas)
    joined = None if record.joined is None else end_of(record.joined)
    wanted = [(version, name) for version in record.results for name in replicas]
    wanted += [(max(record.results), joined.name)] if joined is not None else []
    probes: Mapping[tuple[Order, str], bool] = {} if findings is None else findings.probes
    match = bool(wanted) and all(probes.get(key, False) for key in wanted)
    torn, mislabelled, checked = (0, 0, 0) if findings is None else (findings.torn, findings.mislabelled, findings.checked)

    if record.failure is not None:
        record.wrong.append(record.failure)

    def must(holds: bool, otherwise: str) -> None:
        if not holds and record.failure is None:  # one cause, not all that follows from it
            record.wrong.append(otherwise)

    must(findings is not None and checked > 0, "no response was checked")
    worst = "" if findings is None or not findings.shortfalls else f" ({max(findings.shortfalls, key=lambda found: found.gap)})"
    must(torn == 0, f"{torn} responses were torn{worst}")
    must(mislabelled == 0, f"{mislabelled} responses were mislabelled{worst}")
    must(match, "a replica's probe answers are not those of the version's checkpoint, or are missing")
    numbers = sorted(number for _, number in [*record.results, *record.unpublished])
    published = len(results) == settings.versions and numbers == list(range(1, len(numbers) + 1))
    must(published, f"{len(results)} of {settings.versions} versions were published")
    must(len({result.version.digest for result in results}) == len(results), "two versions have the same digest")
    for name in replicas:
        for result in results:
            mine = [part for part in result.replicas if part.name == name]
            took = bool(mine) and mine[0].state == "loaded" and mine[0].digest == result.version.digest
            took = took or (
                settings.kill and (name, result.version.digest) in record.served_digests
            )  # it was killed, and re-seeded
            must(took, f"{name} did not take version {result.version.number}")
    for end in (*ends, *([] if joined is None else [joined])):
        current = last is not None and end.state == "loaded" and end.digest == last.digest
        must(current, f"{end.name} ended {end.state} at version {end.version}")
    must(joined is not None or not settings.kill_trainer, "no replica joined after the trainer's end")
    must(record.refused_unseeded is not False, "a replica served its scrambled weights")
    must(not record.failures, f"requests failed: {dict(record.failures)}")
    recovered = [kill for kill in record.kills if kill.seconds is not None]
    must(not settings.kill or len(recovered) == len(KILLED), f"{len(recovered)} of {len(KILLED)} losses were recovered from")
    must(settings.kill or not record.unpublished, f"rounds failed: {record.unpublished}")
    slow = settings.learning_rate < RATE  # the loss may not fall in so few steps
    must(slow or len(record.losses) < 2 or record.losses[-1] < record.losses[0], "the loss did not fall")
    must(
        not settings.deltas or settings.replicas < 2 or len(list(changes_of(results))) >= len(results) - 1,
        "all bytes of a version moved",
    )
    labels = {adapter_label(adapted.result.version.run, adapted.result.version.number) for adapted in record.adapters}
    wanted_labels = settings.adapters * settings.versions
    must(len(labels) == wanted_labels, f"{len(labels)} of {wanted_labels} versions of adapters were published")
    answered = {} if findings is None else findings.adapted
    for name, label in itertools.product(replicas, sorted(labels)):
        must((name, label) in answered, f"{name} answered no request by {label}")
    adapters = AdaptersOutcome(
        names=settings.adapters,
        versions=len(labels),
        answers=sum(answered.values()),
        wrong_answers=0 if findings is None else sum(bool(response.asked) for response, _ in findings.wrong),
        failed_requests=sum(record.failures.values()),
        longest_publish_ms=round(1e3 * max((adapted.seconds for adapted in record.adapters), default=0.0), 3),
        resident_mib=tuple(record.resident),
    )
    return Outcome(
        ok=not record.wrong,
        engine=settings.engine,
        delivery=_one({part.delivery for part in parts}) or settings.delivery,
        transport=_one({scheme for part in parts for scheme in part.transports}) or settings.transport,
        trainer_ranks=settings.trainer_ranks,
        versions=len(results),
        bytes_per_version=max((part.nbytes for part in parts), default=0),
        requests_served=record.served,
        responses_checked=checked,
        torn_responses=torn,
        mislabelled_responses=mislabelled,
        replicas=ends,
        trainer_digest=None if last is None else last.digest,
        tokens_match=match,
        pause_ms_p50=round(median(part.paused_seconds for part in parts) * 1e3, 3) if parts else None,
        seconds=round(seconds, 3),
        kills=len(record.kills),
        recoveries=len(recovered),
        requests_interrupted=record.interrupted,
        killed=tuple(
            KillOutcome(**(asdict(kill) | {"seconds": None if kill.seconds is None else round(kill.seconds, 3)}))
            for kill in record.kills
        ),
        joined=joined,
        changes=tuple(changes_of(results)) if settings.deltas else (),
        adapters=adapters if settings.adapters else None,
    )


def changes_of(results: Sequence[RoundResult]) -> Iterator[ChangeOutcome]:
    """What only changed words cost, beside all bytes, in each version that has both."""
    for result in results:
        some = [part for part in result.replicas if part.base is not None]
        dense = [part for part in result.replicas if part.base is None and part.error is None]
        if some and dense:
            numbers = [
                (max(part.nbytes for part in parts), round(1e3 * max(part.paused_seconds for part in parts), 3))
                for parts in (some, dense)
            ]
            yield ChangeOutcome(result.version.number, result.changed, *numbers[0], *numbers[1])


def _one(names: set[str]) -> str:
    return "+".join(sorted(name for name in names if name))
