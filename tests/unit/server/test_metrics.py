"""The coordinator's metrics: what rounds add up to, its state, and labels that have an end."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.virtual_time import virtual

from weightsync.coordinator.events import Audited, RoundEnded
from weightsync.coordinator.round_trace import RoundTracer
from weightsync.coordinator.status import AdapterStatus, Gauges, ReplicaGauges
from weightsync.model import SlowestSpan, Version
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.server.metrics import COORDINATOR_METRICS, CoordinatorMetrics
from weightsync.spans import Span

VERSION = Version(run="run", number=1, manifest="", digest="")
STATE = Gauges("run", 4, False, (), 1, 0, ())


def replica(name: str, state: str, version: int | None, staleness: int = 1) -> ReplicaGauges:
    return ReplicaGauges(name, state, version, staleness, 0.0)


def updated(name: str = "a", error: str | None = None, **changes: Any) -> ReplicaResult:
    given = {"state": "loaded", "phases": {"pause": 0.002, "move": 0.25}, "paused_seconds": 0.5, **changes}
    return ReplicaResult(
        name, given["state"], 1, "", 10, "direct", ("tcp",), "installed", given["phases"], given["paused_seconds"], error
    )


def samples(metrics: CoordinatorMetrics, state: Gauges = STATE) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample as Prometheus reads it, by its name without the prefix and its labels."""
    return {
        (sample.name.removeprefix("weightsync_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text(state).decode())
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def test_exactly_the_declared_metrics_are_exposed() -> None:
    text = CoordinatorMetrics().text(STATE).decode()
    assert re.findall(r"^# TYPE weightsync_(\w+) (\w+)$", text, re.MULTILINE) == [(m.name, m.kind) for m in COORDINATOR_METRICS]
    assert not [m for m in COORDINATOR_METRICS if m.kind == "counter" and not m.name.endswith("_total")]
    labels = {label for m in COORDINATOR_METRICS for label in m.labels}
    assert labels == {
        "adapter",
        "kind",
        "outcome",
        "party",
        "phase",
        "protocol",
        "router",
        "rank",
        "reason",
        "replica",
        "run",
        "service",
        "state",
        "transport",
        "version",
    }
    assert [m.name for m in COORDINATOR_METRICS if "version" in m.labels] == ["build_info"], "the version of the package"


def test_the_state_at_a_scrape_is_exposed_and_nothing_of_earlier_ones() -> None:
    metrics = CoordinatorMetrics()
    slow = {"flush": SlowestSpan("b/1", "flush", 2.5)}
    before = Gauges("run", 4, True, ("trainer/0",), 1, 1, (replica("gone", "loaded", 3),), slowest=slow)
    assert value(samples(metrics, before), "slowest_rank_seconds", phase="flush", rank="b/1") == 2.5
    odd = 'odd "name\\\n'
    found = samples(metrics, Gauges("run", 4, True, (), 1, 0, (replica(odd, "loaded", 3), replica("b", "dirty", None, 5)), 2, 1))
    assert value(found, "replica_version", replica=odd) == 3
    assert value(found, "replica_version", replica="b") is None
    assert value(found, "replica_staleness", replica="b") == 5, "also of a replica without a version"
    assert value(found, "replica_state", replica="b", state="dirty", service="out_of_service") == 1
    assert value(found, "replicas", state="dirty", service="out_of_service") == 1
    assert value(found, "replica_state", replica=odd, state="loaded", service="serving") == 1
    assert value(found, "replica_state", replica="b", state="loaded", service="serving") is None
    assert value(found, "rounds_queued") == 2
    assert value(found, "replicas_late") == 1
    assert value(found, "run_info", run="run") == 1
    assert not [labels for _, labels in found if ("replica", "gone") in labels or ("rank", "b/1") in labels]


def test_the_version_of_an_adapter_is_a_value_and_only_what_is_served_is_shown() -> None:
    def served(name: str, version: int, *replicas: str) -> AdapterStatus:
        return AdapterStatus(name, version, "", 8, None, replicas)

    metrics = CoordinatorMetrics()
    adapters = (served("alice/math", 2, "a", "b"), served("alice/math", 10, "a"), served("bob/code", 0, "b"))
    found = samples(metrics, Gauges("run", 4, False, (), 1, 0, (), adapters=adapters))
    assert value(found, "adapters") == 2
    assert value(found, "adapter_version", adapter="alice/math") == 10
    assert value(found, "adapter_replicas", adapter="alice/math") == 1, "of the newest version"
    assert value(found, "adapter_version", adapter="bob/code") == 0

    many = tuple(served(f"many/{number:04}", 7, "a") for number in range(1500))
    found = samples(metrics, Gauges("run", 4, False, (), 1, 0, (), adapters=many))
    shown = {str(dict(labels)["adapter"]) for name, labels in found if name == "adapter_version"}
    assert shown == {f"many/{number:04}" for number in range(1000)}, "labels have an end, and retired names are gone"
    assert value(found, "adapters") == 1500
    assert value(samples(metrics), "adapters") == 0


def test_rounds_are_added_up() -> None:
    metrics = CoordinatorMetrics()
    bad = updated("b", "move: VerificationError: b/0: differs", state="dirty")
    lost = updated("c", "PeerLost: not connected", state="lost", phases={}, paused_seconds=0.0)
    good = RoundResult(1, VERSION, True, 30, 2.0, {"place": 0.5}, (updated(), bad, lost), ended=100.0, transports={"tcp": 30})
    metrics.count(RoundEnded(1, good, None, False, 2.0, 0.25), None)
    metrics.count(RoundEnded(2, RoundResult(2, VERSION, False, 10, 1.0, {}, (bad,), "why", ended=200.0), "why", True, 1.0), None)
    metrics.count(RoundEnded(3, None, "DeadlineExceeded: place: no answer", False, 5.0), None)
    metrics.count(RoundEnded(4, None, "ValueError: of a vendor's own", False, 5.0), None)
    found = samples(metrics)
    assert value(found, "rounds_total", kind="publish", outcome="ok", reason="") == 1
    assert value(found, "rounds_total", kind="seed", outcome="failed", reason="RoundFailed") == 1
    assert value(found, "rounds_total", kind="publish", outcome="failed", reason="DeadlineExceeded") == 1
    assert value(found, "rounds_total", kind="publish", outcome="failed", reason="other") == 1
    assert value(found, "replica_updates_total", outcome="updated", reason="") == 1
    assert value(found, "replica_updates_total", outcome="failed", reason="VerificationError") == 2
    assert value(found, "replica_updates_total", outcome="lost", reason="PeerLost") == 1
    assert value(found, "verification_failures_total") == 2
    assert value(found, "received_bytes_total", transport="tcp") == 30
    assert value(found, "received_bytes_total", transport="") == 10
    assert value(found, "last_success_timestamp_seconds") == 100
    assert value(found, "round_seconds_count", kind="publish") == 3
    assert value(found, "round_queue_seconds_sum", kind="publish") == 0.25
    assert value(found, "pause_seconds_count") == 3, "of replicas that were paused"
    assert value(found, "phase_seconds_count", party="replica", phase="move") == 2, "of the slowest in each round"
    buckets = [dict(labels)["le"] for name, labels in found if name == "pause_seconds_bucket"]
    assert (min(map(float, buckets)), sorted(map(float, buckets))[-2]) == (0.001, 300.0)


@virtual
async def test_a_trace_adds_what_the_slowest_ranks_did() -> None:
    metrics = CoordinatorMetrics()
    offers = (SimpleNamespace(scheme="tcp"),)
    trainer = SimpleNamespace(rank=SimpleNamespace(hello=SimpleNamespace(offers=offers)))
    context: Any = SimpleNamespace(
        round=1, number=1, epoch=1, seeding=False, trainers={"trainer/0": trainer}, replicas=(), readable=()
    )
    traced = RoundTracer("run", context)
    sent = asyncio.get_running_loop().time()
    await asyncio.sleep(3.0)
    spans = (
        Span("read", 0.0, 2.0, 1.0, "trainer/0", "tcp", 500), Span("read", 0.0, 1.0, 0.5, "trainer/1", "tcp", 500),
        Span("read", 0.0, 1.0, 0.5, "trainer/1", "unknown", 500), Span("flush", 2.0, 0.25, 0.25),
    )  # fmt: skip
    traced.answered("r/0", sent, 0.0, 2.5, asyncio.get_running_loop().time(), spans)
    traced.unanswered("r/1", "Resume", 0.0, 9.0)
    traced.recorder.add("move", 0.0, 2.5, "r")
    traced.end(None)
    metrics.count(RoundEnded(1, None, "PeerLost: gone", False, 3.0), traced)
    found = samples(metrics)
    assert value(found, "phase_seconds_count", party="engine", phase="read") == 1
    assert value(found, "phase_seconds_sum", party="engine", phase="read") == 1.0
    assert value(found, "phase_seconds_sum", party="engine", phase="flush") == 0.25
    assert value(found, "transport_bytes_per_second", transport="tcp") == pytest.approx(1000 / 1.5)
    assert not [labels for _, labels in found if {("phase", "Resume unanswered"), ("transport", "unknown")} & labels]
    assert not [labels for name, labels in found if ("party", "replica") in labels]


def test_a_metric_is_used_as_it_is_declared() -> None:
    registry = CoordinatorMetrics()._registry
    for misuse in (registry.add, registry.set):
        with pytest.raises(KeyError):
            misuse("round_seconds", 1.0)


def test_before_the_first_success_there_is_no_time_of_it() -> None:
    assert value(samples(CoordinatorMetrics()), "last_success_timestamp_seconds") is None


def test_looks_at_what_replicas_serve_are_counted() -> None:
    metrics = CoordinatorMetrics()
    for event in (Audited("r0", 0.2), Audited("r1", 0.3), Audited("r0", 0.1, "VerificationError: r0/0: parameters were changed")):
        metrics.count_audit(event)
    shown = metrics.text(Gauges("run", 4, False, (), 1, 0, ())).decode()
    assert "weightsync_audit_failures_total 1.0" in shown
    assert "weightsync_audit_seconds_count 3.0" in shown
