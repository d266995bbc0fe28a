"""What is taken at a bounded rate: a burst at once, then as much as the time allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weightsync.server import allowance
from weightsync.server.allowance import RateAllowance


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_burst_comes_at_once_and_more_of_it_too_early(clock: SimpleNamespace) -> None:
    frames = RateAllowance(2.0, 4.0)
    assert [frames.take() for _ in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    clock.now += 1.5
    assert frames.take() == 0.0
    clock.now += 1000.0
    assert [frames.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.5], "no more than a burst is saved"


def test_what_is_given_back_may_be_taken_again_and_no_more_than_the_burst(clock: SimpleNamespace) -> None:
    permits = RateAllowance(1.0, 2.0)
    permits.take(2.0)
    assert permits.early(1.0) == 1.0
    permits.take(-1.0)
    assert permits.early(1.0) == 0.0
    permits.take(-5.0)
    assert (permits.early(2.0), permits.early(3.0)) == (0.0, 1.0)
