"""How a receiver's adapter lends batches to the consumer: what one stream's loop gets, and what it never gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.receiver import Batch, _Handover
from weightsync.errors import Aborted, RoundFailed
from weightsync.protocol.messages import Host, Pause, Quarantine

SECONDS = 10.0


def batch(name: str) -> Batch:
    return [(name, torch.zeros(1))]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def handover() -> Iterator[_Handover]:
    made = _Handover(None, SECONDS)
    yield made
    made.close()


def waiting(handover: _Handover, name: str) -> bool:
    """Whether the batch ``name`` is there for the consumer."""
    with handover._changed:
        return handover._changed.wait_for(lambda: bool(handover._batch and handover._batch[0][0] == name), SECONDS)


def test_a_loop_whose_stream_failed_gets_nothing_of_the_next_one(handover: _Handover, pool: ThreadPoolExecutor) -> None:
    """It is still busy with its last batch when the next stream begins."""
    with handover.taking() as me:
        handover.begin()
        first = pool.submit(handover.load, batch("old"))
        assert handover.take(me, Deadline(SECONDS)) is not None
        handover.aborted("a rank failed")
        with pytest.raises(Aborted):
            first.result(SECONDS)
        handover.begin()
        second = pool.submit(handover.load, batch("new"))
        with pytest.raises(RoundFailed, match="a rank failed"):
            handover.take(me, Deadline(SECONDS))
    with handover.taking() as next_loop:
        taken = handover.take(next_loop, Deadline(SECONDS))
        assert taken is not None and taken[0][0] == "new"
        assert not second.done()
        last: Future[Batch | None] = pool.submit(handover.take, next_loop, Deadline(SECONDS))
        second.result(SECONDS)
        handover.resume()
        assert last.result(SECONDS) is None


def test_a_loop_that_got_its_stream_is_told_so_whatever_happens_to_the_next_one(
    handover: _Handover, pool: ThreadPoolExecutor
) -> None:
    with handover.taking() as me:
        handover.begin()
        loading = pool.submit(handover.load, batch("w"))
        assert handover.take(me, Deadline(SECONDS)) is not None
        with handover._changed:  # gives the batch back, and is not scheduled again before all of this happened
            handover._batch, handover._lent = None, False
            handover._changed.notify_all()
        loading.result(SECONDS)
        handover.resume()
        handover.begin()
        handover.aborted("the next one failed")
        assert handover.take(me, Deadline(SECONDS)) is None


def test_an_abort_that_comes_just_before_the_stream_begins_is_not_forgotten(pool: ThreadPoolExecutor) -> None:
    """The adapter waits for the application meanwhile: nobody else would wake it."""
    handover = _Handover(None, SECONDS)
    role = EngineRole(handover, ["inproc"], Host("here", "memory"))
    role.handle(Pause("abort"), SECONDS)
    begin = handover.begin

    def late() -> None:
        role.receive(Quarantine("the round failed"))
        begin()

    handover.begin = late  # type: ignore[method-assign]

    def move() -> None:
        with role.session.turn(role.session.receive("Pause"), Deadline(SECONDS)), role.session.writing(then="paused"):
            role.session.begin()
            role.session.load(batch("w"))

    with pytest.raises(Aborted):
        pool.submit(move).result(SECONDS / 2)
    handover.close()


def test_a_loop_is_told_why_its_stream_ended_though_the_call_was_withdrawn_before(
    handover: _Handover, pool: ThreadPoolExecutor
) -> None:
    role = EngineRole(handover, ["inproc"], Host("here", "memory"))
    with handover.taking() as me:
        handover.begin()
        loading = pool.submit(handover.load, batch("w"))
        assert handover.take(me, Deadline(SECONDS)) is not None
        role.receive(Pause("abort")).withdraw()
        role.receive(Quarantine("no gather"))
        with pytest.raises(Aborted):
            loading.result(SECONDS)
        with pytest.raises(RoundFailed, match="no gather"):
            handover.take(me, Deadline(SECONDS))
