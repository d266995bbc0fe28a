"""Metrics: Prometheus' text format, with names that agents chose."""

from __future__ import annotations

import re

from weightsync.coordinator.events import RoundEnded
from weightsync.coordinator.status import Gauges, ReplicaGauges
from weightsync.model import Version
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.server.metrics import Totals, exposition

SAMPLE = re.compile(r'^weightsync_[a-z_]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? -?[0-9.e+-]+$')


def replica(name: str, state: str, version: int | None) -> ReplicaGauges:
    return ReplicaGauges(name, state, version, None if version is None else 1, {"move": 0.25}, 0.0)


def test_every_line_is_a_comment_or_a_sample() -> None:
    status = Gauges("run", 4, True, (), 1, 0, (replica('odd "name\\\n', "loaded", 3), replica("b", "dirty", None)))
    text = exposition(status, Totals(rounds=5, failed=1, nbytes=10, last_success=1e9))
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.match(line), line
    assert 'weightsync_replica_state{replica="b",state="dirty"} 1' in text
    assert 'weightsync_replica_version{replica="b"}' not in text
    assert 'weightsync_replica_phase_seconds{replica="b",phase="move"} 0.25' in text
    assert 'weightsync_rounds_failed_total{run="run"} 1' in text
    assert 'weightsync_replica_state_since_timestamp_seconds{replica="b"} 0.0' in text
    assert 'weightsync_last_success_timestamp_seconds{run="run"} 1000000000.0' in text


def test_rounds_are_added_up() -> None:
    part = ReplicaResult(
        name="a",
        state="loaded",
        version=1,
        digest="",
        nbytes=10,
        delivery="",
        transports=(),
        verified="",
        phases={},
        paused_seconds=0.5,
    )
    version = Version(run="run", number=1, manifest="", digest="")
    totals = Totals()
    totals.count(RoundEnded(1, RoundResult(1, version, True, 20, 2.0, {}, (part, part), None, 100.0)))
    totals.count(RoundEnded(2, RoundResult(2, version, False, 10, 1.0, {}, (part,), "why", 200.0)))
    totals.count(RoundEnded(3, None, "why"))
    assert totals == Totals(rounds=3, failed=2, nbytes=30, seconds=3.0, paused_seconds=1.5, last_success=100.0)
