"""What counts as ok, and what does not; settings that make no sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples.demo.checking import Findings, Verdict
from examples.demo.outcome import Kill, Outcome, Record, outcome_of
from examples.demo.records import Response
from examples.demo.reports import Adapted
from examples.demo.settings import Settings
from tests.unit.examples.demo.models import version

from weightsync.coordinator.status import ReplicaStatus, Status
from weightsync.errors import ConfigurationError
from weightsync.model import Version
from weightsync.protocol.messages import ReplicaResult, RoundResult

KEYS = [
    "ok", "engine", "delivery", "transport", "trainer_ranks", "versions", "bytes_per_version", "requests_served",
    "responses_checked", "torn_responses", "mislabelled_responses", "replicas", "trainer_digest", "tokens_match", "pause_ms_p50",
    "seconds", "kills", "recoveries", "requests_interrupted", "killed", "joined", "changes", "adapters",
]  # fmt: skip
NAMES = ["replica-0", "replica-1"]
SETTINGS = Settings(versions=2)


def replica_status(name: str, number: int) -> ReplicaStatus:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in msgspec.structs.fields(ReplicaStatus))
    fields |= {"name": name, "state": "loaded", "version": number, "digest": version(number).digest}
    return ReplicaStatus(**fields)


def good() -> tuple[Record, Findings]:
    results = {}
    for number in (1, 2):
        parts = tuple(
            ReplicaResult(name, "loaded", number, version(number).digest, 100, "direct", ("tcp",), "installed", {"move": 0.1}, 0.02)
            for name in NAMES
        )
        results[1, number] = RoundResult(number, version(number), True, 200, 0.2, {}, parts)
    fields: dict[str, Any] = dict.fromkeys(field.name for field in msgspec.structs.fields(Status))
    final = Status(**(fields | {"replicas": tuple(replica_status(name, 2) for name in NAMES)}))
    findings = Findings(Counter({Verdict.SOUND: 9}), [], {((1, number), name): True for number in (1, 2) for name in NAMES})
    return Record(results, [5.0, 4.0], True, 12, {}, final), findings


def test_the_object_for_machines_has_the_agreed_keys() -> None:
    record, findings = good()
    outcome = outcome_of(SETTINGS, NAMES, record, findings, 12.3456)
    assert (outcome.ok, record.wrong) == (True, [])
    found = msgspec.json.decode(msgspec.json.encode(outcome))
    assert list(found) == KEYS
    assert set(found["replicas"][0]) == {"name", "state", "version", "digest"}
    assert found["bytes_per_version"] == 100
    assert found["pause_ms_p50"] == 20.0
    assert (found["delivery"], found["transport"]) == ("direct", "tcp")


def _torn(record: Record, findings: Findings) -> None:
    findings.counts[Verdict.TORN] += 1


def _mislabelled(record: Record, findings: Findings) -> None:
    findings.counts[Verdict.MISLABELLED] += 1


def _nothing_checked(record: Record, findings: Findings) -> None:
    findings.counts.clear()


def _probe_wrong(record: Record, findings: Findings) -> None:
    findings.probes[(1, 1), "replica-1"] = False


def _probe_missing(record: Record, findings: Findings) -> None:
    del findings.probes[(1, 2), "replica-0"]


def _version_missing(record: Record, findings: Findings) -> None:
    del record.results[1, 1]


def _replica_missing(record: Record, findings: Findings) -> None:
    record.results[1, 1] = msgspec.structs.replace(record.results[1, 1], replicas=record.results[1, 1].replicas[:1])


def _dirty(record: Record, findings: Findings) -> None:
    parts = (
        msgspec.structs.replace(record.results[1, 2].replicas[0], state="dirty", digest=None),
        record.results[1, 2].replicas[1],
    )
    record.results[1, 2] = msgspec.structs.replace(record.results[1, 2], replicas=parts)


def _stale_at_the_end(record: Record, findings: Findings) -> None:
    assert record.final is not None
    record.final = msgspec.structs.replace(record.final, replicas=(replica_status("replica-0", 1), replica_status("replica-1", 2)))


def _same_weights_twice(record: Record, findings: Findings) -> None:
    same = msgspec.structs.replace(record.results[1, 1].version, digest=record.results[1, 2].version.digest)
    record.results[1, 1] = msgspec.structs.replace(record.results[1, 1], version=same)


def _served_noise(record: Record, findings: Findings) -> None:
    record.refused_unseeded = False


def _failures(record: Record, findings: Findings) -> None:
    record.failures = {"paused": 1}


def _loss_rose(record: Record, findings: Findings) -> None:
    record.losses = [4.0, 5.0]


def _round_failed(record: Record, findings: Findings) -> None:
    record.unpublished.append((1, 3))


def _crash(record: Record, findings: Findings) -> None:
    record.failure = "PeerLost: replica-0 ended with status 1"


@pytest.mark.parametrize(
    "spoil",
    [
        _torn, _mislabelled, _nothing_checked, _probe_wrong, _probe_missing, _version_missing, _replica_missing, _dirty,
        _stale_at_the_end, _same_weights_twice, _served_noise, _failures, _loss_rose, _round_failed, _crash,
    ],
)  # fmt: skip
def test_whatever_is_wrong_makes_it_not_ok(spoil: Callable[[Record, Findings], None]) -> None:
    record, findings = good()
    spoil(record, findings)
    outcome = outcome_of(SETTINGS, NAMES, record, findings, 1.0)
    assert not outcome.ok
    assert record.wrong


def with_kills() -> tuple[Record, Findings]:
    """Of four versions: one reaches a replica after its round, and one is begun again in a new epoch after a number that failed."""
    record, findings = good()
    last = msgspec.structs.replace(version(5), epoch=2)
    for number, order in ((3, (2, 3)), (5, (2, 5))):
        made = msgspec.structs.replace(version(number), epoch=2)
        parts = tuple(msgspec.structs.replace(part, digest=made.digest) for part in record.results[1, 1].replicas)
        record.results[order] = msgspec.structs.replace(record.results[1, 1], version=made, replicas=parts)
        findings.probes |= {(order, name): True for name in NAMES}
    lost = msgspec.structs.replace(record.results[1, 2].replicas[1], state="lost", digest=None)
    record.results[1, 2] = msgspec.structs.replace(record.results[1, 2], replicas=(record.results[1, 2].replicas[0], lost))
    record.served_digests.add((lost.name, version(2).digest))
    record.unpublished.append((2, 4))
    record.kills = [Kill(name, 7, 3, "3", 4.5, "2@3") for name in ("replica-1", "trainer-1", "coordinator")]
    assert record.final is not None
    record.final = msgspec.structs.replace(record.final, replicas=tuple(replica_status(name, last.number) for name in NAMES))
    return record, findings


def test_who_was_killed_and_came_back_is_ok() -> None:
    record, findings = with_kills()
    outcome = outcome_of(Settings(versions=4, kill=True), NAMES, record, findings, 1.0)
    assert (outcome.ok, record.wrong) == (True, [])
    assert (outcome.kills, outcome.recoveries, outcome.versions) == (3, 3, 4)
    assert msgspec.to_builtins(outcome.killed[0]) == {
        "process": "replica-1", "pid": 7, "round": 3, "version": "3", "seconds": 4.5, "back_at": "2@3",
    }  # fmt: skip


def _not_back(record: Record, findings: Findings) -> None:
    record.kills[1].seconds = None


def _not_killed(record: Record, findings: Findings) -> None:
    record.kills.pop()


def _not_seeded_again(record: Record, findings: Findings) -> None:
    record.served_digests.clear()


def _probe_after_recovery(record: Record, findings: Findings) -> None:
    findings.probes[(2, 3), "replica-0"] = False


@pytest.mark.parametrize("spoil", [_not_back, _not_killed, _not_seeded_again, _probe_after_recovery, _torn, _failures])
def test_who_did_not_come_back_as_promised_is_not_ok(spoil: Callable[[Record, Findings], None]) -> None:
    record, findings = with_kills()
    spoil(record, findings)
    assert not outcome_of(Settings(versions=4, kill=True), NAMES, record, findings, 1.0).ok
    assert record.wrong


def with_adapters() -> tuple[Record, Findings]:
    """Of a good run with two versions of one adapter."""
    record, findings = good()
    for number in (1, 2):
        result = msgspec.structs.replace(record.results[1, number], version=Version("a/b", number, "", ""))
        record.adapters.append(Adapted(0.1 * number, result))
        findings.adapted.update((name, f"a/b@{number}") for name in NAMES)
    record.resident[:] = [300, 301]
    return record, findings


def _adapter_missing(record: Record, findings: Findings) -> None:
    record.adapters.pop()


def _adapter_unanswered(record: Record, findings: Findings) -> None:
    del findings.adapted["replica-1", "a/b@1"]


def _adapter_wrong(record: Record, findings: Findings) -> None:
    findings.counts[Verdict.MISLABELLED] += 1
    findings.wrong.append((Response("replica-0", (1,), (2,), (1,), (0,), asked="a/b", adapter="a/b@1"), Verdict.MISLABELLED))


def test_adapters_are_ok_if_every_version_was_published_and_answered_everywhere() -> None:
    settings = Settings(versions=2, adapters=1)
    outcome = outcome_of(settings, NAMES, *with_adapters(), 1.0)
    assert outcome.ok
    assert msgspec.to_builtins(outcome.adapters) == {
        "names": 1, "versions": 2, "answers": 4, "wrong_answers": 0, "failed_requests": 0, "longest_publish_ms": 200.0,
        "resident_mib": (300, 301),
    }  # fmt: skip
    for spoil in (_adapter_missing, _adapter_unanswered, _adapter_wrong):
        record, findings = with_adapters()
        spoil(record, findings)
        outcome = outcome_of(settings, NAMES, record, findings, 1.0)
        assert outcome.adapters is not None
        assert (outcome.ok, outcome.adapters.wrong_answers) == (False, int(spoil is _adapter_wrong)), record.wrong


def test_a_run_that_saw_nothing_is_not_ok_and_still_has_all_keys() -> None:
    outcome: Outcome = outcome_of(SETTINGS, [], Record(), None, 1.0)
    assert not outcome.ok
    assert not outcome.tokens_match
    assert list(msgspec.to_builtins(outcome)) == KEYS


def test_settings_reach_every_process_as_json() -> None:
    settings = Settings(role="client", coordinator="http://a:1", directory=Path("/shared"), replica_urls=("http://b:2",), seed=5)
    sent = msgspec.json.decode(msgspec.json.encode(settings.for_children()), type=Settings)
    assert (sent.seed, sent.coordinator, sent.role, sent.directory) == (5, "http://a:1", "all", None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trainer_ranks": 0}, "--trainer-ranks"),
        ({"versions": 10**6}, "--versions"),
        ({"pause_mode": "nap"}, "--pause-mode is one of abort, wait, keep"),
        ({"model": "gpt"}, "--model"),
        ({"engine": "none"}, "transformers, vllm"),
        ({"engine_tp": 2}, "--engine vllm"),
        ({"timeout": 0.0}, "--timeout"),
        ({"adapters": 101}, "--adapters must be from 0 to 100"),
        ({"adapters": 1, "trainer": "megatron"}, "--adapters needs"),
        ({"adapters": 1, "kill": True}, "--adapters goes without --kill"),
        ({"kill": True, "versions": 3}, "--versions 4"),
        ({"kill": True, "coordinator": "http://head:7400"}, "--kill"),
        ({"token_file": Path("token"), "coordinator": "http://head:7400"}, "--token-file"),
        ({"role": "replica"}, "--coordinator"),
        ({"role": "trainer", "coordinator": "http://head:7400"}, "--directory"),
        ({"role": "client", "coordinator": "http://head:7400", "directory": Path("/tmp")}, "--replica-url"),
        ({"replica_urls": ("http://a:1",)}, "--replica-url"),
    ],
)
def test_settings_that_make_no_sense_say_so(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Settings(**wrong)
