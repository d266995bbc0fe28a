"""Ranks that enter together: an agreement that failed keeps nothing of those who asked for it."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.engines.in_step import InStep
from weightsync.errors import DeadlineExceeded, PeerLost


def test_a_group_that_could_not_be_made_keeps_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        pass

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(dist, "new_group", fails)
    together, freed = InStep([0, 1]), list[weakref.ref[Memory]]()

    def enters() -> None:
        memory = Memory()
        freed.append(weakref.ref(memory))
        together.meet(Deadline(20))

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            try:
                enters()
            except PeerLost as error:
                assert "connection refused" in str(error)
            else:
                pytest.fail("it did not fail")
        assert [memory() for memory in freed] == [None, None]
    finally:
        gc.enable()


def test_a_vote_is_waited_for_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine had slept, all ranks gave up their votes: nobody entered, each held the module, and no update paused it."""

    class Answered:
        def wait(self, limit: timedelta) -> bool:
            assert limit >= timedelta(seconds=1)
            return True

    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Answered())
    together, deadline = InStep([0, 1]), Deadline(30.0)
    together.meet(deadline)
    deadline.at -= 60.0
    assert together.vote(True, deadline) == (True, True)
    assert not together.voting
    with pytest.raises(DeadlineExceeded):
        together.meet(deadline)


def test_a_rank_that_is_interrupted_when_all_have_met_owes_its_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """It met the others again, in a question that they took for its vote, and they entered alone."""

    class Answered:
        def wait(self, limit: timedelta) -> bool:
            return True

    class Interrupted(deque[Any]):
        def popleft(self) -> Any:
            monkeypatch.setattr(Interrupted, "popleft", deque.popleft)
            raise KeyboardInterrupt

    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Answered())
    together, deadline = InStep([0, 1]), Deadline(30.0)
    together._asked = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        together.meet(deadline)
    assert together.voting
    assert together.vote(True, deadline) != (True, True), "it votes against: it did not say that it is free"
    together.meet(deadline)
    assert together.vote(True, deadline) == (True, True)
