"""A call that was aborted after it arrived changes nothing, and what a rank reports after an abort stays true."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import pytest
import torch
from tests.unit.engine.test_update import SECONDS, Stage, Watched

from weightsync import failpoints
from weightsync.engine.engine_role import EngineRole
from weightsync.errors import Aborted, DeadlineExceeded, PlanMismatch, StaleSource
from weightsync.model import PauseMode, Version
from weightsync.protocol.messages import Body, CheckSources, Commit, Move, Pause, Prepare, Quarantine, Resume, Update
from weightsync.tensors.shards import Shard


class Held(Watched):
    """Stands still in ``shards`` or in ``pause`` when it is told to."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.hold = ""
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self.moved = False

    def _maybe(self, where: str) -> None:
        if self.hold == where:
            self.entered.set()
            assert self.may_go_on.wait(SECONDS)

    def shards(self) -> Sequence[Shard]:
        self._maybe("shards")
        if self.moved:
            self.moved = False
            raise PlanMismatch("other parameters")
        return super().shards()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._maybe("pause")
        super().pause(mode, timeout)


@pytest.fixture
def adapter() -> Held:
    return Held(torch.nn.Linear(6, 4, bias=False))


@pytest.fixture
def stage(adapter: Held) -> Iterator[Stage]:
    """An engine that serves version 1 and is ready for version 2."""
    with ExitStack() as owned:
        stage = Stage(adapter, owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        assert stage.update(stage.place(1)).committed
        adapter.said.clear()
        yield stage


def at(point: str, act: Callable[[], None]) -> Callable[[str], None]:
    """A gate that acts at ``point``, once."""
    left = [act]

    def gate(name: str) -> None:
        if name == point and left:
            left.pop()()

    return gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    return lambda point, act: monkeypatch.setattr(failpoints, "_gate", at(point, act))


def serving(role: EngineRole) -> int | None:
    return None if role.session.served_version is None else role.session.served_version.number


STEPS: dict[str, Callable[[Version], Body]] = {
    "update": lambda version: Update(version, "abort"),
    "pause": lambda version: Pause("abort"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_call_that_was_aborted_before_it_began_leaves_the_engine_serving(stage: Stage, name: str) -> None:
    call = stage.engine.receive(STEPS[name](stage.place(2)))
    stage.engine.session.abort()  # the connection broke while the call waited for its thread
    with pytest.raises(Aborted):
        call.run(SECONDS)
    assert stage.adapter.said == []
    assert serving(stage.engine) == 1


@pytest.mark.parametrize("point", ["engine.received.update", "engine.pausing", "engine.pause", "engine.move", "engine.finish"])
def test_an_update_that_is_aborted_at_any_point_never_commits(
    stage: Stage, point: str, gate: Callable[[str, Callable[[], None]], None]
) -> None:
    version, reported = stage.place(2), []

    def lost() -> None:
        stage.engine.session.abort()
        reported.append(serving(stage.engine))  # what the Hello of the next connection says

    gate(point, lost)
    with pytest.raises(Aborted):
        stage.update(version)
    assert "resume" not in stage.adapter.said
    assert reported == [serving(stage.engine)], "the Hello told what the engine does"
    assert serving(stage.engine) == (1 if point == "engine.received.update" else None)
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.update(version).committed, "a later round brings the version"
    assert serving(stage.engine) == 2


@pytest.mark.parametrize("point", ["engine.received.update", "engine.pausing", "engine.pause", "engine.move", "engine.finish"])
def test_a_call_that_is_withdrawn_ends_alone(stage: Stage, point: str, gate: Callable[[str, Callable[[], None]], None]) -> None:
    version = stage.place(2)
    earlier, later = stage.engine.receive(Prepare(stage.plan())), stage.engine.receive(Prepare(stage.plan()))
    earlier.run(SECONDS)
    updating = stage.engine.receive(Update(version, "abort"))

    def withdrawn() -> None:
        earlier.withdraw()  # its answer is under way
        later.withdraw()  # it waits for its turn

    gate(point, withdrawn)
    updating.run(SECONDS)
    assert serving(stage.engine) == 2
    with pytest.raises(Aborted):
        later.run(SECONDS)
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.update(stage.place(3)).committed, "the withdrawal ended no connection"


@pytest.mark.parametrize("point", ["engine.received.update", "engine.pausing", "engine.pause", "engine.move", "engine.finish"])
def test_an_update_that_is_withdrawn_at_any_point_never_commits(
    stage: Stage, point: str, gate: Callable[[str, Callable[[], None]], None]
) -> None:
    version = stage.place(2)
    updating = stage.engine.receive(Update(version, "abort"))
    gate(point, lambda: print(updating.withdraw()))
    with pytest.raises(Aborted):
        updating.run(SECONDS)
    assert "resume" not in stage.adapter.said
    assert serving(stage.engine) == (1 if point == "engine.received.update" else None)
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.update(version).committed, "a later round brings the version"


@pytest.mark.parametrize("point", ["engine.received.update", "engine.pausing", "engine.pause", "engine.resume", "engine.resumed"])
def test_a_quarantine_that_gave_up_waiting_is_not_forgotten(
    stage: Stage, point: str, gate: Callable[[str, Callable[[], None]], None]
) -> None:
    version = stage.place(2)

    def quarantine() -> None:
        if point == "engine.received.update":
            stage.engine.handle(Quarantine("the test"), SECONDS)
            return
        with pytest.raises(DeadlineExceeded, match="never resumed"):
            stage.engine.handle(Quarantine("the test"), 0.05)

    gate(point, quarantine)
    with pytest.raises(Aborted):
        stage.update(version)
    assert serving(stage.engine) is None
    assert stage.engine.session._calls.paused, "the call that held the turn has carried it out"
    assert "finish" not in stage.adapter.said or point.startswith("engine.resume")
    if point == "engine.resume":
        assert "resume" not in stage.adapter.said
    if point == "engine.resumed":
        assert stage.adapter.said[-1] == "pause abort", "what was resumed meanwhile is paused again"


def test_a_quarantine_that_gave_up_waiting_for_a_prepare_is_carried_out_after_it(
    stage: Stage, gate: Callable[[str, Callable[[], None]], None]
) -> None:
    def quarantine() -> None:
        with pytest.raises(DeadlineExceeded, match="never resumed"):
            stage.engine.handle(Quarantine("another replica holds other bytes"), 0.05)

    gate("engine.prepared", quarantine)
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.adapter.said == ["pause abort"]
    assert serving(stage.engine) is None


@pytest.mark.parametrize("body", [Move(2), Commit(Version("run", 2, "", "")), Resume()], ids=lambda body: type(body).__name__)
def test_later_steps_that_were_aborted_before_they_began_do_nothing(stage: Stage, body: Body) -> None:
    version = stage.place(2)
    steps: list[Body] = [Pause("abort"), Move(2), Commit(version), Resume()]
    for step in steps[: [type(one) for one in steps].index(type(body))]:
        stage.engine.handle(step, SECONDS)
    state, said = stage.engine.session.state, list(stage.adapter.said)
    call = stage.engine.receive(Commit(version) if isinstance(body, Commit) else body)
    stage.engine.session.abort()
    with pytest.raises(Aborted):
        call.run(SECONDS)
    assert (stage.engine.session.state, stage.adapter.said) == (state, said)
    assert serving(stage.engine) is None


def test_nothing_is_reported_while_memory_is_followed_and_nothing_is_taken_back_after_an_abort(stage: Stage, adapter: Held) -> None:
    version = stage.place(2)
    adapter.hold = "shards"
    with ThreadPoolExecutor(1) as thread:
        updating = thread.submit(stage.update, version)
        assert adapter.entered.wait(SECONDS)
        before = serving(stage.engine)
        stage.engine.session.abort()
        adapter.moved = True
        adapter.may_go_on.set()
        with pytest.raises(PlanMismatch):
            updating.result(SECONDS)
    assert before is None
    after = serving(stage.engine)
    assert after is None, "somebody may have been told that it serves nothing"


def test_a_pause_that_changed_nothing_goes_back_to_serving(stage: Stage, adapter: Held) -> None:
    version = stage.place(2)
    adapter.moved = True
    with pytest.raises(PlanMismatch):
        stage.update(version)
    assert adapter.said == []
    assert serving(stage.engine) == 1


def test_a_quarantine_that_comes_late_does_not_undo_a_newer_round(stage: Stage) -> None:
    version = stage.place(2)
    late = stage.engine.receive(Quarantine("of an earlier round"))  # on another thread than rounds
    assert stage.update(version).committed
    late.run(SECONDS)
    assert serving(stage.engine) == 2
    stage.engine.handle(Quarantine("of this round"), SECONDS)
    after = serving(stage.engine)
    assert after is None


@pytest.mark.parametrize("body", [Pause("abort"), Quarantine("the rank left")], ids=lambda body: type(body).__name__)
def test_a_call_that_arrives_after_close_leaves_the_engine_as_it_is(stage: Stage, body: Body) -> None:
    """The connection ends after the role, so that a call may still come in between."""
    early = stage.engine.receive(body)
    stage.engine.close()
    for call in (early, stage.engine.receive(body)):
        with nullcontext() if isinstance(body, Quarantine) else pytest.raises(Aborted, match="was closed"):
            call.run(SECONDS)
    assert stage.adapter.said == []
    assert serving(stage.engine) == 1


def test_the_adapter_is_never_paused_twice_without_a_resume(stage: Stage, adapter: Held) -> None:
    stage.engine.handle(Pause("abort"), SECONDS)
    stage.engine.handle(Quarantine("cancelled"), SECONDS)
    stage.engine.handle(Pause("keep"), SECONDS)
    stage.engine.handle(Quarantine("cancelled"), SECONDS)
    assert adapter.said == ["pause abort"]
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.update(stage.place(2)).committed
    assert adapter.said == ["pause abort", "finish", "flush", "resume"]
    stage.engine.handle(Pause("keep"), SECONDS)
    assert adapter.said[-1] == "pause keep"


def test_a_call_that_cannot_get_its_turn_names_the_adapter_call_that_hangs(stage: Stage, adapter: Held) -> None:
    version = stage.place(2)
    adapter.hold = "pause"
    with ThreadPoolExecutor(1) as thread:
        updating = thread.submit(stage.update, version)
        assert adapter.entered.wait(SECONDS)
        with pytest.raises(DeadlineExceeded, match=r"is inside Held.pause\(\) for .* s, so Quarantine .* never resumed"):
            stage.engine.handle(Quarantine("it hangs"), 0.05)
        with pytest.raises(DeadlineExceeded, match=r"is inside Held.pause\(\) for .* s, so Prepare did not get its turn"):
            stage.engine.handle(Prepare(stage.plan()), 0.05)
        adapter.may_go_on.set()
        with pytest.raises(Aborted):
            updating.result(SECONDS)
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert stage.update(version).committed, "it heals by itself"
    assert adapter.said.count("resume") == 1


def test_a_version_that_nobody_holds_any_more_is_noticed_while_the_engine_serves(stage: Stage, adapter: Held) -> None:
    version = stage.place(2)
    stage.engine.handle(CheckSources(version.number), SECONDS)
    stage.trainer.region.header.invalidate()  # what a trainer does with memory that is read in place, when publish returns
    with pytest.raises(StaleSource, match="version 2"):
        stage.engine.handle(CheckSources(version.number), SECONDS)
    assert adapter.said == []
    assert serving(stage.engine) == 1
