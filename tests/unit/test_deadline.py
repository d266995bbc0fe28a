"""Every timeout becomes a deadline, which refuses what cannot be waited for."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future

import pytest
from tests.virtual_time import virtual

from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, 1e11])
def test_what_cannot_be_waited_for_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="above zero and at most"):
        Deadline(seconds)


def test_the_longest_can_be_waited_for() -> None:
    lock = threading.Lock()
    assert lock.acquire(timeout=Deadline(threading.TIMEOUT_MAX / 2).remaining("the lock") + 60)


def test_what_is_left_is_never_below_zero_and_a_passed_deadline_says_what_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    deadline = Deadline(2.0)
    assert (deadline.left, deadline.remaining("x")) == (2.0, 2.0)
    clock = 102.5
    assert deadline.left == 0.0
    with pytest.raises(DeadlineExceeded, match="reading did not finish within 2 s"):
        deadline.remaining("reading")


@virtual
async def test_a_rounds_deadline_follows_the_clock_of_its_loop_and_may_have_passed_already() -> None:
    deadline = RoundDeadline(3600.0)
    await asyncio.sleep(3599)
    assert round(deadline.left, 3) == 1.0
    assert not RoundDeadline(-1.0).left
    await asyncio.sleep(2)
    with pytest.raises(DeadlineExceeded, match=r"no time is left for planning: the 3.6e\+03 s of the round have passed"):
        deadline.remaining("planning")


def test_a_future_is_waited_for_until_it_is_done_or_late_or_aborted() -> None:
    done, never, aborted = Future[int](), Future[int](), Future[None]()
    done.set_result(5)
    assert Deadline(1.0).result(done, "reading") == 5
    assert Deadline(1.0).result(done, "reading", aborted) == 5
    for given in (None, aborted):
        with pytest.raises(DeadlineExceeded, match="reading did not finish within"):
            Deadline(0.05).result(never, "reading", given)
    aborted.set_result(None)
    with pytest.raises(Aborted, match="reading was aborted"):
        Deadline(60.0).result(never, "reading", aborted)


def test_a_result_that_comes_just_too_late_is_late() -> None:
    class JustLate(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            self.set_result(5)
            raise TimeoutError

    with pytest.raises(DeadlineExceeded, match="reading"):
        Deadline(1.0).result(JustLate(), "reading")
