"""An answer that is long in the making is given again for a while; a short one never."""

from __future__ import annotations

import time

import pytest

from weightsync.server import snapshots
from weightsync.server.snapshots import Snapshot


class Clock:
    """Both clocks: ``make`` takes ``cost`` seconds of each."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.made = 100.0, cost, 0

    monotonic = thread_time = lambda self: self.now

    def make(self) -> bytes:
        self.made += 1
        self.now += self.cost
        return b"%d" % self.made


@pytest.mark.parametrize(("cost", "made"), [(0.005, 50), (0.05, 10)])
def test_all_that_ask_take_a_tenth_of_the_loop_at_most(monkeypatch: pytest.MonkeyPatch, cost: float, made: int) -> None:
    clock = Clock(cost)
    monkeypatch.setattr(snapshots, "time", clock)
    snapshot = Snapshot(clock.make)
    for _ in range(50):
        snapshot.get()
        clock.now += 0.1
    assert made - 2 <= clock.made <= made


def test_a_short_answer_is_always_new() -> None:
    numbers = iter(range(1000))
    snapshot = Snapshot(lambda: b"%d" % next(numbers))
    began = time.monotonic()
    assert [snapshot.get() for _ in range(1000)] == [b"%d" % number for number in range(1000)]
    assert time.monotonic() - began < 5


def test_a_long_answer_is_new_when_what_it_is_of_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had published asked for the status at once, and got the one from before the round."""
    clock, rounds = Clock(0.05), [object()]
    monkeypatch.setattr(snapshots, "time", clock)
    snapshot = Snapshot(clock.make, lambda: rounds[-1])
    assert [snapshot.get(), snapshot.get()] == [b"1", b"1"]
    rounds.append(object())
    assert [snapshot.get(), snapshot.get()] == [b"2", b"2"]
