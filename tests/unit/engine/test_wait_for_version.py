"""Waiting for a version at an engine rank: it ends with the version, the deadline or the rank, whichever comes first."""

from __future__ import annotations

import threading

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.engine.session import EngineSession
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.model import Version


def version(number: int, epoch: int = 1) -> Version:
    return Version("run", number, "m" * 16, "d" * 16, epoch)


def session() -> EngineSession:
    return EngineSession(ModuleAdapter(torch.nn.Linear(2, 2)), "a/0")


def serve(rank: EngineSession, served: Version) -> None:
    call = rank.receive("update")
    with rank.turn(call, Deadline(5)):
        with rank.leaving_service():
            rank.pause("abort", 5)
        with rank.writing():
            rank.begin()
        rank.finish(served)
        rank.commit(served)
        with rank.resuming(Deadline(5)):
            pass


@pytest.mark.parametrize("wanted", [7, 6, version(7), version(300)])
def test_returns_when_the_version_or_a_later_one_is_served(wanted: int | Version) -> None:
    rank = session()
    answers: list[Version] = []
    waiter = threading.Thread(target=lambda: answers.append(rank.wait_for_version(wanted, Deadline(10))))
    waiter.start()
    serve(rank, version(7, epoch=2 if wanted == version(300) else 1))
    waiter.join(10)
    assert [answer.number for answer in answers] == [7]


def test_an_earlier_version_is_waited_past_until_the_deadline() -> None:
    rank = session()
    serve(rank, version(6))
    with pytest.raises(DeadlineExceeded, match="a/0 to serve version 7"):
        rank.wait_for_version(7, Deadline(0.05))


def test_closing_the_engine_ends_the_wait() -> None:
    rank = session()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            rank.wait_for_version(1, Deadline(10))
        except Aborted as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    rank.close(1.0, lambda: None)
    waiter.join(10)
    assert len(errors) == 1
