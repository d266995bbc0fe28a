"""An engine rank compares what it serves with what it installed: a word that was changed is found, and rounds go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
from tests.unit.engine.test_update import SECONDS, Stage, Watched

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.fill.direct import HostDirect
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, StaleSource, VerificationError
from weightsync.model import Version
from weightsync.protocol.messages import Audit, Body, CheckSources, Done, LetGo, Prepare, Quarantine, Refuted


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as owned:
        owned.callback(failpoints.install, lambda name: None)
        stage = Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        yield stage


@pytest.fixture
def served(stage: Stage) -> Version:
    version = stage.place(1)
    assert stage.update(version).committed
    return version


def test_what_was_installed_is_found(stage: Stage, served: Version) -> None:
    for _ in range(3):
        assert stage.engine.handle(Audit(served), SECONDS) == Done()
    assert stage.adapter.said[-1] == "resume", "the engine heard nothing of it"


def test_one_word_that_somebody_changed_is_named_by_its_tensor(stage: Stage, served: Version) -> None:
    with torch.no_grad():
        stage.adapter.module.weight[3, 5] += 1.0  # type: ignore[index,operator]
    with pytest.raises(VerificationError, match=rf"changed since it installed version {served}: weight"):
        stage.engine.handle(Audit(served), SECONDS)
    stage.engine.handle(Quarantine("its weights were changed"), SECONDS)
    assert stage.engine.session.refuted is None
    again = stage.place(2)
    assert stage.update(again).committed, "the next update heals it"
    assert stage.engine.handle(Audit(again), SECONDS) == Done()


def test_a_difference_is_reported_once_and_remembered_until_the_next_update(stage: Stage, served: Version) -> None:
    reports: list[Body] = []
    stage.engine._report = reports.append
    with torch.no_grad():
        stage.adapter.module.weight[3, 5] += 1.0  # type: ignore[index,operator]
    for _ in range(3):  # its answer may be lost
        with pytest.raises(VerificationError, match="weight"):
            stage.engine.handle(Audit(served), SECONDS)
    [report] = reports
    assert isinstance(report, Refuted)
    assert (report.version, stage.engine.session.refuted) == (served, (served, report.reason))
    assert stage.engine.session.served_version is None
    again = stage.place(2)
    assert stage.update(again).committed
    assert stage.engine.session.refuted is None
    assert stage.engine.handle(Audit(again), SECONDS) == Done()


def test_words_that_are_equal_as_numbers_and_differ_in_their_bits_are_found(stage: Stage, served: Version) -> None:
    with torch.no_grad():
        stage.source.weight.zero_()
    version = stage.place(2)
    assert stage.update(version).committed
    stage.adapter.module.weight.data.neg_()  # type: ignore[operator]
    assert torch.equal(stage.adapter.module.weight, stage.source.weight)  # type: ignore[arg-type]
    with pytest.raises(VerificationError, match="weight"):
        stage.engine.handle(Audit(version), SECONDS)


def test_only_the_version_that_is_served_is_looked_at(stage: Stage, served: Version) -> None:
    newer = stage.place(2)
    with pytest.raises(StaleSource, match="it is not known what"):
        stage.engine.handle(Audit(newer), SECONDS)
    stage.engine.handle(Quarantine("a round failed"), SECONDS)
    with pytest.raises(StaleSource, match="it is not known what"):
        stage.engine.handle(Audit(served), SECONDS)


def test_parameters_that_moved_are_no_failure(stage: Stage, served: Version) -> None:
    module = stage.adapter.module
    module.weight = torch.nn.Parameter(torch.randn(4, 6))
    with pytest.raises(StaleSource, match="are elsewhere since it installed"):
        stage.engine.handle(Audit(served), SECONDS)


def test_memory_that_a_module_in_use_has_left_is_not_read(stage: Stage, served: Version) -> None:
    with stage.adapter.in_use():
        assert stage.engine.handle(Audit(served), SECONDS) == Done()
        stage.adapter.module.load_state_dict({"weight": torch.zeros(4, 6)}, assign=True)
        with pytest.raises(StaleSource, match="are elsewhere since it installed"):
            stage.engine.handle(Audit(served), SECONDS)
    assert stage.engine.session.served_version == served


def test_an_engine_that_sleeps_is_never_read_while_it_serves(stage: Stage, served: Version) -> None:
    stage.engine.session.sleeps = True
    with pytest.raises(ConfigurationError, match="can be read again"):
        stage.engine.handle(Audit(served), SECONDS)


def test_without_the_trainers_memory_it_goes_on(stage: Stage, served: Version) -> None:
    stage.engine.handle(LetGo(), SECONDS)
    assert stage.engine._filler is None
    assert stage.engine.handle(Audit(served), SECONDS) == Done()
    with torch.no_grad():
        stage.adapter.module.weight[3, 5] += 1.0  # type: ignore[index,operator]
    with pytest.raises(VerificationError, match=rf"changed since it installed version {served}: weight"):
        stage.engine.handle(Audit(served), SECONDS)


def test_a_look_that_is_given_up_ends_soon_and_breaks_no_connection(
    stage: Stage, served: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = stage.engine._filler
    assert isinstance(filler, HostDirect)
    reached, go_on = threading.Event(), threading.Event()

    def gate(name: str) -> None:
        if name == "engine.audit":
            reached.set()
            assert go_on.wait(SECONDS)

    failpoints.install(gate)
    aborted: list[object] = []
    monkeypatch.setattr(filler, "abort", lambda: aborted.append(filler))
    looking = stage.engine.receive(Audit(served))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(looking.run, SECONDS)
        assert reached.wait(SECONDS)
        looking.withdraw()
        go_on.set()
        with pytest.raises(Aborted):
            answer.result(SECONDS)
    assert not aborted, "its connections would be made again, in the pause of the next round"
    failpoints.install(lambda name: None)
    assert stage.engine.session.served_version == served, "it serves on"
    version = stage.place(2)
    assert stage.update(version).committed
    assert stage.engine._filler is filler
    assert stage.engine.handle(Audit(version), SECONDS) == Done()


@pytest.mark.parametrize("moment", ["begins", "ends"])
def test_a_look_that_is_withdrawn_when_it_begins_or_ends_leaves_the_connections_alone(
    stage: Stage, served: Version, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    aborted: list[object] = []
    filler, looking, look = stage.engine._filler, stage.engine.receive(Audit(served)), stage.engine._handlers[Audit]
    assert filler is not None
    monkeypatch.setattr(filler, "abort", lambda: aborted.append(filler))

    def withdrawn(body: Body, deadline: Deadline) -> Body | None:
        if moment == "begins":
            looking.withdraw()
        try:
            return look(body, deadline)
        finally:
            looking.withdraw()

    monkeypatch.setitem(stage.engine._handlers, Audit, withdrawn)
    with suppress(Aborted):
        looking.run(SECONDS)
    assert not aborted


def test_a_look_ends_when_another_call_arrives(stage: Stage, served: Version) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def gate(name: str) -> None:
        if name == "engine.audit":
            reached.set()
            assert go_on.wait(SECONDS)

    failpoints.install(gate)
    looking = stage.engine.receive(Audit(served))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(looking.run, SECONDS)
        assert reached.wait(SECONDS)
        other = stage.engine.receive(CheckSources(1))
        go_on.set()
        with pytest.raises(Aborted):
            answer.result(SECONDS)
    assert other.run(SECONDS) == Done()
    assert stage.engine.handle(Audit(served), SECONDS) == Done()


def test_a_look_waits_for_no_other_call(stage: Stage, served: Version) -> None:
    looking, other = stage.engine.receive(Audit(served)), stage.engine.session.receive("Place")
    with ThreadPoolExecutor(1) as threads, stage.engine.session.turn(other, Deadline(SECONDS)):
        refused = threads.submit(looking.run, SECONDS).exception(SECONDS)
    assert isinstance(refused, DeadlineExceeded)
    assert "is busy with Place, so Audit did not get its turn" in str(refused)
    assert looking.yields
    assert looking.turn_seconds < stage.engine.turn_seconds
    with pytest.raises(Aborted):
        looking.run(SECONDS)
