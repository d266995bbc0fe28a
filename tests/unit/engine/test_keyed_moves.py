"""Digests under a secret key: an engine rank's, of what it installed, are the trainer rank's, of what is in its region."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tests.unit.engine.test_update import SECONDS, Stage, Watched

from weightsync import failpoints
from weightsync.errors import Aborted, StaleSource
from weightsync.protocol.messages import Body, DigestUnderKey, Move, Moved, Pause, Placed, Prepare

KEY = b"sixteen bytes or more"


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as owned:
        yield Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)


def trainers(stage: Stage, number: int = 1, epoch: int = 1, key: bytes = KEY) -> int:
    """Sum of the digests of the trainer rank's rows."""
    answer = stage.trainer.handle(DigestUnderKey(number, epoch, key), SECONDS)
    assert isinstance(answer, Placed)
    return int(np.frombuffer(answer.digests, "<u8").sum(dtype=np.uint64))


def moved(stage: Stage, key: bytes) -> int:
    stage.engine.handle(Pause("keep"), SECONDS)
    answer = stage.engine.handle(Move(1, key), SECONDS)
    assert isinstance(answer, Moved)
    return int(np.frombuffer(answer.digests, "<u8").sum(dtype=np.uint64))


@pytest.mark.parametrize("key", [b"", KEY])
def test_both_sides_agree_under_the_same_key_and_no_other(stage: Stage, key: bytes) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    stage.place(1)
    assert moved(stage, key) == trainers(stage, key=key)
    assert trainers(stage) != trainers(stage, key=b"another key of 128 bits or more")


def test_a_change_that_the_engine_installed_is_seen(stage: Stage) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    stage.place(1)
    before = trainers(stage)
    stage.trainer.region.payload[5] ^= 1  # type: ignore[union-attr]
    assert moved(stage, KEY) == trainers(stage) != before


@pytest.mark.parametrize(("number", "epoch"), [(2, 1), (0, 1), (1, 2)])
def test_a_version_that_is_not_in_the_region_is_not_digested(stage: Stage, number: int, epoch: int) -> None:
    stage.place(1)
    with pytest.raises(StaleSource, match="does not hold version"):
        trainers(stage, number, epoch)


def test_nothing_is_digested_between_the_call_of_publish_and_the_copy(stage: Stage) -> None:
    stage.place(1)
    stage.trainer.arm(2, 2)
    with pytest.raises(StaleSource):
        trainers(stage)


@pytest.mark.parametrize("ends", ["publish", "close"])
def test_a_digest_that_runs_does_not_delay_the_trainer(stage: Stage, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.place(1)
    stage.trainer.disarm()
    begun, goes_on = threading.Event(), threading.Event()

    def gate(name: str) -> None:
        if name == "trainer.digest":
            begun.set()
            assert goes_on.wait(SECONDS)

    monkeypatch.setattr(failpoints, "_gate", gate)
    outcome: list[BaseException | int] = []

    def digest() -> None:
        try:
            outcome.append(trainers(stage))
        except Aborted as error:
            outcome.append(error)

    thread = threading.Thread(target=digest)
    thread.start()
    assert begun.wait(SECONDS)
    if ends == "publish":
        stage.trainer.arm(2, 2)
        goes_on.set()
    else:
        closing = threading.Thread(target=stage.trainer.close)
        closing.start()
        while not stage.trainer._stop_digest[0]:
            pass
        goes_on.set()
        closing.join()
    thread.join()
    assert isinstance(outcome[0], Aborted)


@pytest.mark.parametrize("body", [Move(1, KEY), DigestUnderKey(1, 1, KEY)])
def test_no_message_shows_its_key(body: Body) -> None:
    assert "sixteen" not in repr(body)
