"""Ranks that enter together: an agreement that failed keeps nothing of those who asked for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.engines.in_step import InStep
from weightsync.errors import PeerLost


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
