"""Updates by a framework's trainer rank: an update that does not reach all replicas is an error that says whose."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest

from weightsync.errors import DeadlineExceeded, RoundFailed
from weightsync.integrations.updates import check_reached, in_thread, overdue_walk
from weightsync.model import Version
from weightsync.model.result import ReplicaResult, RoundResult


def result(**errors: str | None) -> RoundResult:
    """A round whose replicas ended with these errors."""
    replicas = tuple(
        ReplicaResult(name, "loaded", 1, None, 0, "direct", (), "installed", {}, 0.0, error) for name, error in errors.items()
    )
    return RoundResult(1, Version("run", 1, "", ""), True, 0, 0.0, {}, replicas)


@pytest.mark.parametrize(
    ("outcome", "wanted", "words"),
    [
        (result(a=None), 2, r"reached 1 of 2 servers \(the others have left\)"),
        (result(a=None, b="no room"), 2, r"reached 1 of 2 servers \(b: no room\)"),
        (result(a=None, b="no room", c=None), ["a", "b"], r"reached 1 of 2 servers \(b: no room\)"),
        (result(a=None, c=None), ("a", "b"), r"reached 1 of 2 servers \(b: it has left\)"),
    ],
)
def test_an_update_that_does_not_reach_all_names_the_others(outcome: RoundResult, wanted: Any, words: str) -> None:
    with pytest.raises(RoundFailed, match=words):
        check_reached(outcome, "servers", wanted)


def test_further_replicas_do_no_harm() -> None:
    check_reached(result(a=None, b=None, c="no room"), "servers", 2)
    check_reached(result(a=None, c="no room"), "servers", ["a"])
    check_reached(result(c="no room"), "servers", 0)


def test_a_walk_that_another_rank_holds_up_is_an_error() -> None:
    joined = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match=r"policy rank 3 did not walk its weights within 0\.5 s"):
            overdue_walk(in_thread(lambda: joined.wait(30)), "policy rank 3", 0.5)
    finally:
        joined.set()


def test_a_walk_that_ended_after_all_has_its_own_result_or_error() -> None:
    def fail() -> None:
        raise TimeoutError("of the walk")

    done = in_thread(lambda: 7)
    assert done.result(5) == 7
    assert overdue_walk(done, "rank 0", 5) == 7
    failed = in_thread(fail)
    wait([failed], 5)
    with pytest.raises(TimeoutError, match="of the walk"):
        overdue_walk(failed, "rank 0", 5)
