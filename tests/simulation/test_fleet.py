"""A rolling round of many hosts, some of which fail: it ends, keeps to its limit, and what it cost is counted."""

from __future__ import annotations

import dataclasses

import pytest
from tests.simulation.fleet import FleetOutcome, run_fleet


def check(outcome: FleetOutcome) -> None:
    assert not outcome.violations
    assert outcome.round_ok
    assert outcome.replicas_updated + outcome.replicas_failed == outcome.replicas
    assert outcome.replicas_failed <= outcome.hosts_failed
    assert 0 < outcome.most_out_of_service <= outcome.max_unavailable + outcome.hosts_failed
    assert outcome.frames < 16 * outcome.engine_ranks


def test_a_small_fleet_loses_a_host_in_a_rolling_round() -> None:
    outcome = run_fleet(64, failing=1 / 8)
    check(outcome)
    assert (outcome.hosts_failed, outcome.max_unavailable) == (1, 1)
    again = dataclasses.asdict(run_fleet(64, failing=1 / 8))
    for name, value in dataclasses.asdict(outcome).items():
        assert name in ("cpu_seconds", "all_cpu_seconds", "peak_bytes") or again[name] == value, name


def test_without_a_limit_all_are_out_of_service_at_once() -> None:
    outcome = run_fleet(64, unavailable=1.0, failing=0.0)
    assert (outcome.most_out_of_service, outcome.replicas_updated, outcome.replicas_failed) == (8, 8, 0)


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_4096_ranks_lose_five_of_512_hosts() -> None:
    outcome = run_fleet(4096)
    print(outcome)
    check(outcome)
    assert outcome.hosts_failed == 5
    assert outcome.round_seconds < 60
    assert outcome.serving_after_seconds < 120
    assert outcome.peak_bytes < 2e9
