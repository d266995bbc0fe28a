"""Holds that an adapter has one driver at a time, and that an engine which others resumed is paused before it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import pytest
import torch
from tests.unit.engine.test_update import Stage, Watched

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import Body, Commit, Move, Pause, Prepare, Quarantine, Resume
from weightsync.protocol.update_messages import Receive, Verify
from weightsync.transports.broadcast.process_groups import ProcessGroup
from weightsync_disaggregated.rank import DisaggregatedRank

SECONDS = 20.0


class Twice(Watched):
    """May be paused again."""

    pauses_twice = True


class Zeros:
    """A group over which zeros come."""

    backend, closed = "gloo", False

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        for one in tensors:
            one.zero_()

    def close(self) -> None:
        self.closed = True


class Outside:
    """Updates the stage's engine from outside."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self.rank = DisaggregatedRank(adapter)
        self.rank._groups["g"] = cast(ProcessGroup, Zeros())

    def tell(self, body: Body) -> Body | WeightSyncError:
        try:
            return self.rank.answer(body, SECONDS, 7)
        except WeightSyncError as error:
            return error

    def load(self) -> None:
        self.tell(Pause("abort"))
        self.tell(Receive("g", (0,)))
        self.tell(Verify())

    def commit(self) -> None:
        self.tell(Commit(Version("outside", 9, self.rank.manifest.fingerprint, "0" * 16, 1)))
        self.tell(Resume())


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as owned:
        made = Stage(Twice(torch.nn.Linear(6, 4, bias=False)), owned)
        made.engine.handle(Prepare(made.plan()), SECONDS)
        yield made


def said(stage: Stage) -> set[Version | None]:
    """What the rank says that it holds, and that it generates with."""
    return {stage.engine.session.serving, stage.engine.session.served_version}


def weight(stage: Stage) -> torch.Tensor:
    return stage.adapter.module.get_parameter("weight")


def test_a_rank_serves_nothing_once_its_engine_is_updated_from_outside(stage: Stage) -> None:
    version = stage.place(1)
    assert stage.update(version).committed
    assert stage.engine.session.served_version == version
    outside = Outside(stage.adapter)
    outside.load()
    assert said(stage) == {None}
    outside.commit()
    assert said(stage) == {None}
    assert not torch.any(weight(stage))
    version = stage.place(2)
    assert stage.update(version).committed
    assert stage.engine.session.served_version == version
    assert "quarantined" in str(outside.tell(Verify()))


def test_a_round_that_an_update_from_outside_overtakes_commits_nothing(stage: Stage) -> None:
    version = stage.place(1)
    stage.engine.handle(Pause("abort"), SECONDS)
    stage.engine.handle(Move(1), SECONDS)
    outside = Outside(stage.adapter)
    outside.load()
    for late in (Commit(version), Resume()):
        with pytest.raises(ProtocolError):
            stage.engine.handle(late, SECONDS)
    outside.commit()
    with pytest.raises(ProtocolError):
        stage.engine.handle(Move(1), SECONDS)
    assert not torch.any(weight(stage))


def test_an_update_from_outside_that_a_round_overtakes_commits_nothing(stage: Stage) -> None:
    outside = Outside(stage.adapter)
    outside.load()
    version = stage.place(1)
    assert stage.update(version).committed
    calls = stage.adapter.said.copy()
    outside.commit()
    assert stage.adapter.said == calls
    assert stage.engine.session.served_version == version


@pytest.mark.parametrize("arrives", ["before the round", "after the round"])
def test_a_quarantine_of_an_update_that_a_round_overtook_does_not_pause_the_engine(stage: Stage, arrives: str) -> None:
    outside = Outside(stage.adapter)
    outside.load()
    late = outside.rank.session.receive("Quarantine", 7, aborts=True)
    version = stage.place(1)
    assert stage.update(version).committed
    if arrives == "after the round":
        outside.tell(Quarantine("late"))
    else:
        outside.rank.session.quarantine(late, Deadline(SECONDS))
    assert stage.engine.session.served_version == version
    assert not stage.engine.session._calls.paused
    assert stage.adapter.said[-1] == "resume"


def test_a_quarantine_of_a_round_that_an_update_from_outside_overtook_does_not_spoil_it(stage: Stage) -> None:
    assert stage.update(stage.place(1)).committed
    late = stage.engine.receive(Quarantine("the round was given up"))
    outside = Outside(stage.adapter)
    outside.load()
    late.run(SECONDS)
    outside.commit()
    served = outside.rank.session.served_version
    assert served is not None
    stage.engine.handle(Quarantine("another digest was published"), SECONDS)
    reported = outside.rank.session.served_version
    assert reported is None, "one that arrives now pauses whatever serves"
    assert stage.engine.session._calls.paused


def test_an_engine_that_somebody_else_resumed_is_paused_before_it_is_written(stage: Stage) -> None:
    stage.engine.handle(Quarantine("a failed round"), SECONDS)
    stage.adapter.resume()  # by the engine's own means
    stage.engine.handle(Pause("abort"), SECONDS)
    assert stage.adapter.said == ["pause abort", "resume", "pause keep"]


def test_a_pause_again_that_fails_leaves_an_engine_that_is_not_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.place(1)
    stage.engine.handle(Pause("abort"), SECONDS)
    stage.engine.handle(Move(1), SECONDS)

    def fails(mode: str, timeout: float) -> None:
        raise RuntimeError("cannot pause")

    with monkeypatch.context() as patched:
        patched.setattr(stage.adapter, "pause", fails)
        with pytest.raises(RuntimeError, match="cannot pause"):
            stage.engine.handle(Pause("abort"), SECONDS)
    with pytest.raises(ProtocolError, match="is pausing"):
        stage.engine.handle(Move(1), SECONDS)


def test_a_class_with_another_pause_must_say_itself_that_it_pauses_twice() -> None:
    class Other:
        def pause(self, mode: str, timeout: float) -> None:
            return

    class Inherits(ModuleAdapter):
        pass

    class Mixed(Other, ModuleAdapter):
        pass

    class Says(Mixed):
        pauses_twice = True

    assert [one.pauses_twice for one in (EngineAdapter, ModuleAdapter, Inherits, Watched, Mixed, Says)] == [
        False, True, True, False, False, True,
    ]  # fmt: skip


def test_a_class_says_by_what_it_defines_whether_it_sleeps_and_can_load_and_a_wrapper_takes_its_inner_ones_word() -> None:
    class Sleeps(EngineAdapter):
        def wake_weights(self) -> None:
            return

    class StaysWhereItIs(Sleeps):
        sleeps = False

    class Wrapper(ModuleAdapter):
        def __init__(self, inner: EngineAdapter) -> None:
            self.sleeps, self.can_load = inner.sleeps, inner.can_load

    made = (EngineAdapter(), Sleeps(), StaysWhereItIs(), ModuleAdapter(torch.nn.Linear(1, 1)), Wrapper(Sleeps()))
    assert [(one.sleeps, one.can_load) for one in made] == [
        (False, False), (True, False), (False, False), (False, True), (True, False),
    ]  # fmt: skip
