"""Holds what the simulation found: bugs of the real code, each in the smallest form that shows it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.simulation.main import run_many

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine_role import EngineRole
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.model import Manifest, PauseMode, Version
from weightsync.protocol.messages import Host, Pause, Quarantine, Resume
from weightsync.tensors.shards import Shard, manifest_of, shards_of

VERSION = Version("run", 1, "", "")


class Stubborn(EngineAdapter):
    """Takes as long to pause and to resume as the test wants."""

    def __init__(self) -> None:
        self.state = {"w": torch.zeros(4)}
        self.generating = True
        self.entered = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def manifest(self) -> Manifest:
        return manifest_of(self.state)

    def shards(self) -> Sequence[Shard] | None:
        return shards_of(self.state)[1]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.entered.set()
        assert self.may_end.wait(10)
        self.generating = False

    def resume(self) -> None:
        self.entered.set()
        assert self.may_end.wait(10)
        self.generating = True


@pytest.fixture
def adapter() -> Stubborn:
    return Stubborn()


@pytest.fixture
def role(adapter: Stubborn) -> EngineRole:
    role = EngineRole(adapter, ["inproc"], Host("here", "memory"))
    role.session.serving = VERSION
    return role


def test_an_engine_that_resumed_after_its_quarantine_gave_up_is_paused_again(adapter: Stubborn, role: EngineRole) -> None:
    role.session.state, adapter.generating = "committed", False
    adapter.may_end.clear()
    with ThreadPoolExecutor(1) as thread:
        resuming = thread.submit(role.handle, Resume(), 5.0)
        assert adapter.entered.wait(10)
        with pytest.raises(DeadlineExceeded, match="never resumed"):
            role.handle(Quarantine("too slow"), 0.05)
        adapter.may_end.set()
        with pytest.raises(Aborted, match="paused again"):
            resuming.result(10)
    assert not adapter.generating
    assert role.session.served_version is None
    assert role.session.serving is None


def test_an_engine_that_is_being_paused_serves_no_version(adapter: Stubborn, role: EngineRole) -> None:
    """A coordinator that it connects to meanwhile would route requests to it, and it would never answer them."""
    before = role.session.served_version
    assert before == VERSION
    adapter.may_end.clear()
    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(role.handle, Pause("abort"), 5.0)
        assert adapter.entered.wait(10)
        during = role.session.served_version
        adapter.may_end.set()
        pausing.result(10)
    assert during is None
    after = role.session.served_version
    assert after is None


def test_an_engine_whose_adapter_raises_in_aborted_is_paused_all_the_same(adapter: Stubborn, role: EngineRole) -> None:
    """Its replica was dirty, and it generated on (schedule 2730207)."""

    def fail(reason: str) -> None:
        raise RuntimeError("not now")

    adapter.aborted = fail  # type: ignore[method-assign]
    role.handle(Quarantine("it did not pause"), 5.0)
    assert not adapter.generating
    assert role.session.served_version is None


def test_an_engine_whose_quarantine_has_arrived_serves_no_version(adapter: Stubborn, role: EngineRole) -> None:
    """It lost its connection before the pause and reported on the new one that it serves: requests came, and were never
    answered (schedule 8102)."""
    quarantine = role.receive(Quarantine("other bytes were published"))
    assert role.session.served_version is None
    quarantine.run(5.0)
    assert not adapter.generating
    assert role.session.served_version is None


def test_a_quarantine_that_is_late_takes_no_version_from_an_update_that_began_after_it(adapter: Stubborn, role: EngineRole) -> None:
    quarantine = role.receive(Quarantine("too slow"))
    role.handle(Pause("abort"), 5.0)
    role.session.state, role.session.serving = "committed", VERSION
    role.handle(Resume(), 5.0)
    assert role.session.served_version == VERSION
    quarantine.run(5.0)
    assert adapter.generating
    assert role.session.served_version == VERSION


def test_a_pause_that_failed_is_made_up_for_by_the_quarantine(adapter: Stubborn, role: EngineRole) -> None:
    def fail(mode: PauseMode, timeout: float) -> None:
        raise RuntimeError("not now")

    adapter.pause, works = fail, adapter.pause  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="not now"):
        role.handle(Pause("abort"), 5.0)
    adapter.pause = works  # type: ignore[method-assign]
    assert adapter.generating
    role.handle(Quarantine("it did not pause"), 5.0)
    assert not adapter.generating


def test_an_engine_remembers_what_it_took_although_it_serves_it_no_more(role: EngineRole) -> None:
    """Nobody else may know by then that the number was used (schedule 2730051)."""
    role.session.state = "written"
    role.session.finish(VERSION)
    role.handle(Quarantine("its trainer is gone"), 5.0)
    assert role.session.served_version is None
    assert role.session.latest == VERSION


def test_schedules_that_found_something() -> None:
    """A quarantine that a new connection overtook; a broadcast that others broke although it went to one reader (twice); a number
    used twice; an act that lasted until the calm; an adapter that raises in ``aborted``; ranks at two steps after a restart; a vote
    that its rank gave up, for good and when a machine had slept; an act that began when no process was left; a turn that came just
    before the deadline; parameters that stayed tied while an update that a crashed coordinator began seemed to run."""
    seeds = (8_102, 1_001_805, 1_001_989, 2_001_866, 2_600_672, 2_730_051, 2_730_133, 2_730_207)
    for seed in (*seeds, 4_004_165, 4_004_348, 4_100_598, 4_101_500):
        assert not run_many([seed]).failed, seed
