"""The gate between generation and updates: nobody runs while it is closed, nothing is reported that was not committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from examples.demo.gate import Gate, NotSeeded
from tests.unit.examples.demo.models import version

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, ProtocolError, WeightSyncError
from weightsync.model import PauseMode


@contextmanager
def running(gate: Gate, until: threading.Event | None = None) -> Iterator[tuple[threading.Event, list[int]]]:
    """A thread inside the gate until the event yielded is set; the list gets the version that it saw."""
    leave, inside, seen = until or threading.Event(), threading.Event(), list[int]()

    def run() -> None:
        with gate.entered(Deadline(20)) as found:
            seen.append(found.number)
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(10)
    try:
        yield leave, seen
    finally:
        leave.set()
        thread.join(20)
        assert not thread.is_alive()


def seeded(number: int = 1) -> Gate:
    gate = Gate()
    gate.pause("abort", 1)
    gate.label(version(number))
    gate.resume()
    return gate


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[WeightSyncError]]:
    errors: list[WeightSyncError] = []

    def run() -> None:
        try:
            work()
        except WeightSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_before_the_first_commit_nobody_enters_and_the_error_says_why() -> None:
    gate = Gate()
    with pytest.raises(NotSeeded, match="not seeded"), gate.entered(Deadline(5)):
        pass
    gate.pause("keep", 1)
    with pytest.raises(NotSeeded), gate.entered(Deadline(5)):
        pass
    assert gate.version is None
    assert not gate.seeded


def test_it_does_not_open_without_a_commit() -> None:
    gate = Gate()
    gate.pause("wait", 1)
    with pytest.raises(ProtocolError, match="never committed"):
        gate.resume()
    gate = seeded()
    gate.pause("wait", 1)  # the old label does not survive the pause: what follows may have been written to
    with pytest.raises(ProtocolError, match="never committed"):
        gate.resume()


def test_weights_are_not_named_while_somebody_uses_them() -> None:
    gate = seeded(1)
    with pytest.raises(ProtocolError, match="generation is running"):
        gate.label(version(2))
    with running(gate) as (_, seen):
        with pytest.raises(DeadlineExceeded):
            gate.pause("abort", 0.05)
        with pytest.raises(ProtocolError, match="generation is running"):
            gate.label(version(2))
        assert seen == [1]


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_pause_returns_only_when_nobody_is_inside(mode: PauseMode) -> None:
    gate = seeded()
    with running(gate) as (leave, _):
        thread, errors = in_thread(lambda: gate.pause(mode, 20))
        thread.join(0.1)
        assert thread.is_alive()
        assert gate.stopping == (mode != "wait")
        assert not gate.idle
        leave.set()
        thread.join(10)
        assert not thread.is_alive()
        assert not errors
        assert gate.idle


def test_a_pause_that_takes_too_long_stays_closed() -> None:
    gate = seeded()
    with running(gate):
        with pytest.raises(DeadlineExceeded, match="1 requests running"):
            gate.pause("wait", 0.05)
        assert gate.version is None
        with pytest.raises(DeadlineExceeded, match="waiting for new weights"), gate.entered(Deadline(0.05)):
            pass


def test_who_waits_enters_under_the_new_version() -> None:
    gate = seeded(1)
    gate.pause("keep", 1)
    seen: list[int] = []

    def enter() -> None:
        with gate.entered(Deadline(20)) as found:
            seen.append(found.number)

    thread, errors = in_thread(enter)
    thread.join(0.05)
    assert not seen
    gate.label(version(2))
    thread.join(0.05)
    assert not seen  # named, but not open yet
    gate.resume()
    thread.join(10)
    assert (seen, errors) == ([2], [])


def test_the_end_sends_everybody_away() -> None:
    gate = seeded()
    gate.pause("keep", 1)

    def enter() -> None:
        with gate.entered(Deadline(20)):
            pass

    thread, errors = in_thread(enter)
    thread.join(0.05)
    gate.end()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [Aborted]
