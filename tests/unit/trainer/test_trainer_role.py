"""Holds that a trainer rank places its weights for the call of ``publish()`` that goes on, and for no other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from types import FrameType
from typing import Any

import pytest
import torch

from weightsync import failpoints
from weightsync.errors import Aborted, VersionError
from weightsync.protocol.messages import Place, Placed
from weightsync.publishing import published_shards
from weightsync.publishing.publication import ReaderAccess
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import transport

SECONDS = 20.0


@pytest.fixture
def weights() -> torch.Tensor:
    return torch.ones(64)


@pytest.fixture
def role(weights: torch.Tensor) -> Iterator[TrainerRole]:
    role = TrainerRole({"w": weights}, ReaderAccess([transport("inproc")], b"k" * 32, this_host()))
    yield role
    role.close()


def place(role: TrainerRole, number: int, call: int) -> Placed:
    placed = role.handle(Place(number, call=call), SECONDS)
    assert isinstance(placed, Placed)
    return placed


@pytest.mark.parametrize("asked", [None, 1])
def test_what_was_asked_of_an_interrupted_call_does_not_take_the_weights_of_the_next(
    role: TrainerRole, weights: torch.Tensor, asked: int | None
) -> None:
    role.arm(1, asked)
    role.disarm()  # Ctrl-C
    weights.fill_(2.0)
    placing = role.arm(2, asked)
    with pytest.raises(Aborted, match="not publishing version 1"):
        place(role, 1, call=1)
    assert placing.number is None
    place(role, asked or 2, call=2)
    assert placing.number == (asked or 2)


def test_a_version_that_is_asked_for_again_is_the_one_that_was_placed(role: TrainerRole, weights: torch.Tensor) -> None:
    """By a coordinator that was restarted, while ``publish_async`` is called again already."""
    role.arm(1, None)
    first = place(role, 1, call=1)
    role.disarm()
    weights.fill_(2.0)
    role.arm(2, None)
    assert place(role, 1, call=1) == first
    other = place(role, 2, call=2)
    assert other.digests != first.digests
    with pytest.raises(Aborted, match="not publishing version 1"):
        place(role, 1, call=1)
    with pytest.raises(Aborted, match="not publishing version 3"):
        place(role, 3, call=2)


def test_a_placing_whose_call_was_interrupted_while_it_was_waited_for_does_not_go_on_in_the_next(
    role: TrainerRole, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C ends the wait for the placing, which is stopped but has not noticed."""
    inside, go = threading.Event(), threading.Event()
    outcomes: list[object] = []

    def slow(name: str) -> None:
        if name == "trainer.placing" and not inside.is_set():
            inside.set()
            assert go.wait(SECONDS)

    def asked() -> None:
        try:
            outcomes.append(place(role, 1, call=1))
        except Aborted as error:
            outcomes.append(error)

    def interrupted(timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(failpoints, "_gate", slow)
    role.arm(1, None)
    worker = threading.Thread(target=asked)
    worker.start()
    assert inside.wait(SECONDS)
    role._running.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        role.disarm()
    weights.fill_(2.0)
    placing = role.arm(2, None)
    go.set()
    worker.join(SECONDS)
    assert [type(outcome) for outcome in outcomes] == [Aborted]
    assert placing.number is None
    assert place(role, 1, call=2)


@pytest.mark.parametrize("after", range(1, 8))
def test_an_exception_of_a_signal_handler_leaves_a_region_that_can_be_placed_again(after: int) -> None:
    """It is raised at a line of ``placing``, ``after`` lines from its beginning."""
    region, left = PublishedRegion(64, "layout", windows=True), [after]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is PublishedRegion.placing.__wrapped__.__code__ and event == "line":  # type: ignore[attr-defined]
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def place_once() -> None:
        with region.placing(1):
            pass

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            place_once()
    finally:
        sys.settrace(before)
    with region.placing(2), pytest.raises(VersionError, match="another version is being placed"), region.placing(3):
        pass
    assert region.version == 2
    region.close()


def test_parameters_that_moved_are_followed_although_a_signal_handler_interrupted_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied must be the memory that was found: half of a version came from where parameters had been before."""
    state = {"w": torch.ones(64)}

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    role = TrainerRole(state, ReaderAccess([transport("inproc")], b"k" * 32, this_host()))
    with closing(role):
        state["w"] = torch.full((64,), 2.0)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(published_shards, "HostPublisher", interrupted)
            role.arm(1, None)
        role.arm(2, None)
        place(role, 1, call=2)
        assert isinstance(role.region, PublishedRegion)
        assert torch.equal(torch.from_numpy(role.region.payload.copy()).view(torch.float32), torch.full((64,), 2.0))
