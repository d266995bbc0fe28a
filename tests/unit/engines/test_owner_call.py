"""Rounds inside a call of the framework that owns the engine: what enters, what ends the call, and what never runs outside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from tests.unit.engine.test_update import SECONDS, Stage, Watched

from weightsync.engines.owner_call import OwnerCall
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, RoundFailed
from weightsync.model import PauseMode, Version
from weightsync.protocol.messages import Pause, Prepare, Quarantine, Update, Updated

SHORT = 0.2


class Called(Watched):
    """A module whose owner lets updates in by ``call``."""

    owner_pauses = True
    pauses_twice = True

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.call = OwnerCall(self._load, "replica r")
        self.loaded_on: list[str] = []
        self.fault: Exception | None = None

    def _load(self) -> None:
        self.loaded_on.append(threading.current_thread().name)
        if self.fault is not None:
            raise self.fault

    def announced(self, order: tuple[int, int] | None) -> None:
        self.call.announced(order)

    def aborted(self, reason: str) -> None:
        self.call.aborted(reason)

    def call_ended(self, call: int, reason: str, refuse: bool) -> None:
        self.call.ended(call, reason, refuse)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.call.pause(mode, timeout)
        super().pause(mode, timeout)

    def begin(self) -> None:
        self.call.require_call()
        super().begin()

    def finish(self, version: Version) -> None:
        super().finish(version)
        self.call.install(SECONDS)

    def resume(self) -> None:
        super().resume()
        self.call.resume(SECONDS)


class Framework:
    """Calls the engine from its own thread."""

    def __init__(self, adapter: Called, threads: ThreadPoolExecutor) -> None:
        self._adapter, self._threads = adapter, threads

    def calls(self, number: int | None = None, epoch: int | None = None, timeout: float = SECONDS) -> Future[float]:
        return self._threads.submit(self._adapter.call.serve, number, epoch, timeout)


@pytest.fixture
def adapter() -> Called:
    return Called(torch.nn.Linear(6, 4, bias=False))


@pytest.fixture
def stage(adapter: Called) -> Iterator[Stage]:
    with ExitStack() as owned:
        stage = Stage(adapter, owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        yield stage


@pytest.fixture
def framework(adapter: Called, stage: Stage) -> Iterator[Framework]:
    with ThreadPoolExecutor(4, thread_name_prefix="framework") as threads:
        yield Framework(adapter, threads)
        adapter.aborted("the test ended")


def weight(stage: Stage) -> list[float]:
    return [float(value) for value in next(stage.adapter.module.parameters()).detach().flatten()]


def published(stage: Stage) -> list[float]:
    return [float(value) for value in stage.source.weight.detach().flatten()]


def wait_until_inside(adapter: Called) -> None:
    with adapter.call._changed:
        assert adapter.call._changed.wait_for(lambda: adapter.call._call is not None, SECONDS)


def test_an_update_runs_inside_the_call_and_ends_it(stage: Stage, adapter: Called, framework: Framework) -> None:
    for number in (1, 2):
        call = framework.calls(number)
        assert stage.update(stage.place(number)).committed
        assert call.result(SECONDS) >= 0
        assert weight(stage) == published(stage)
        assert stage.engine.session.served_version is not None
    assert all(name.startswith("framework") for name in adapter.loaded_on)
    assert adapter.said.count("resume") == 2


def test_an_update_waits_for_the_call(stage: Stage, adapter: Called, framework: Framework) -> None:
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(stage.update, stage.place(1))
        assert not update.done()
        assert framework.calls().result(SECONDS) >= 0
        assert update.result(SECONDS).committed


def test_without_a_call_nothing_is_written(stage: Stage, framework: Framework) -> None:
    before, version = weight(stage), stage.place(1)
    with pytest.raises(DeadlineExceeded, match=r"owns replica r did not let the update in within .* keeps its weights"):
        stage.engine.handle(Update(version, "keep"), SHORT)
    assert weight(stage) == before
    call = framework.calls(1)
    assert stage.update(version).committed
    call.result(SECONDS)


def test_a_call_without_an_update_ends_at_its_timeout_and_the_next_one_works(stage: Stage, framework: Framework) -> None:
    with pytest.raises(DeadlineExceeded, match=r"no update to version 1 came within 0\.2 s, and the engine keeps its"):
        framework.calls(1, timeout=SHORT).result(SECONDS)
    call = framework.calls(1)
    assert stage.update(stage.place(1)).committed
    call.result(SECONDS)


def test_a_second_call_at_the_same_time_is_refused(adapter: Called, stage: Stage, framework: Framework) -> None:
    first = framework.calls()
    wait_until_inside(adapter)
    with pytest.raises(ConfigurationError, match="another call for an update lasts"):
        framework.calls().result(SECONDS)
    assert stage.update(stage.place(1)).committed
    first.result(SECONDS)


def test_an_update_to_an_earlier_version_does_not_enter(stage: Stage, adapter: Called, framework: Framework) -> None:
    call = framework.calls(2)
    wait_until_inside(adapter)
    with pytest.raises(DeadlineExceeded, match=r"did not let the update in within .* \(its call waits for version 2\)"):
        stage.engine.handle(Update(stage.place(1), "keep"), SHORT)
    assert not call.done()
    assert stage.update(stage.place(2)).committed
    call.result(SECONDS)


@pytest.mark.parametrize(
    ("number", "epoch", "order", "enters"),
    [
        (3, None, (1, 3), True), (3, None, (1, 4), True), (3, None, (1, 2), False), (3, 2, (1, 8), False), (3, 2, (2, 3), True),
        (3, 2, (3, 0), True), (None, None, (1, 0), True), (3, 1, None, True),
    ],
)  # fmt: skip
def test_which_versions_enter(number: int | None, epoch: int | None, order: tuple[int, int] | None, enters: bool) -> None:
    call = OwnerCall(lambda: None, "r")
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(call.serve, number, epoch, SECONDS)
        with call._changed:
            assert call._changed.wait_for(lambda: call._call is not None, SECONDS)
        call.announced(order)
        if enters:
            call.pause("abort", SECONDS)
            call.resume(SECONDS)
            serving.result(SECONDS)
        else:
            with pytest.raises(DeadlineExceeded):
                call.pause("abort", 0.05)
            call.announced((9, 9))
            call.pause("abort", SECONDS)
            call.resume(SECONDS)


def test_a_load_that_raises_fails_the_update_and_the_call_and_the_next_update_waits_for_a_call(
    stage: Stage, adapter: Called, framework: Framework
) -> None:
    call, adapter.fault = framework.calls(1), ValueError("injected")
    with pytest.raises(ValueError, match="injected"):
        stage.update(stage.place(1))
    stage.engine.handle(Quarantine("the load raised: injected"), SECONDS)
    with pytest.raises(RoundFailed, match="do not resume the engine before another update succeeds: the load raised: injected"):
        call.result(SECONDS)
    adapter.fault, torn = None, weight(stage)
    stage.source.weight.data.fill_(7)
    version = stage.place(2)
    with pytest.raises(DeadlineExceeded, match="did not let the update in"):
        stage.engine.handle(Update(version, "keep"), SHORT)
    assert weight(stage) == torn  # nothing was written outside a call
    call = framework.calls(2)
    assert stage.update(version).committed
    call.result(SECONDS)
    assert weight(stage) == published(stage)


def test_a_lost_connection_ends_the_call(stage: Stage, adapter: Called, framework: Framework) -> None:
    call = framework.calls()
    stage.place(1)
    stage.engine.handle(Pause("abort", 1), SECONDS)
    stage.engine.session.abort()
    with pytest.raises(RoundFailed, match="its connection to the coordinator broke"):
        call.result(SECONDS)
    with pytest.raises(Aborted, match="call of replica r has ended"):
        adapter.begin()


def test_a_quarantine_ends_the_wait_for_a_call_and_waits_for_none_itself(stage: Stage) -> None:
    version = stage.place(1)
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(stage.engine.handle, Update(version, "keep"), SECONDS)
        with pytest.raises(Aborted, match="given up before the framework called replica r: a newer version"):
            for _ in range(100):  # until the update has arrived
                stage.engine.handle(Quarantine("a newer version"), SECONDS)
                if update.done():
                    update.result()
                threading.Event().wait(0.01)
    assert stage.engine.session.served_version is None


def test_a_quarantine_does_not_end_a_call_that_no_update_has_entered(stage: Stage, adapter: Called, framework: Framework) -> None:
    call = framework.calls(1)
    wait_until_inside(adapter)
    stage.engine.handle(Quarantine("another version is served elsewhere"), SECONDS)
    assert not call.done()
    answer = stage.update(stage.place(1))
    assert isinstance(answer, Updated)
    assert answer.committed
    call.result(SECONDS)
