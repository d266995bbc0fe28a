"""Holds what becomes of a run whose coordinator or trainer is restarted, and that a run in which nothing happens does nothing."""

from __future__ import annotations

import selectors
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
from tests.integration.server.test_service_lost import process

import weightsync.trainer.trainer
from weightsync.config import ClientSettings, ServerSettings
from weightsync.coordinator.events import Joined
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed, VersionError
from weightsync.model import PauseMode
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.requests import PublishRequests
from weightsync.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

SECONDS = 20.0


class Held(ModuleAdapter):
    """Stops in the middle of a move when told to."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.go, self.moving = threading.Event(), threading.Event()
        self.go.set()

    def wake_weights(self) -> None:
        self.moving.set()
        assert self.go.wait(SECONDS)


def serves(adapter: ModuleAdapter, source: torch.nn.Linear, number: int) -> bool:
    """Whether it generates, with this version's label and weights; one that was left paused raises."""
    with adapter.in_use(timeout=5) as version:
        return version is not None and version.number == number and torch.equal(adapter.module.weight, source.weight)  # type: ignore[arg-type]


def test_a_coordinator_killed_in_the_middle_of_a_round_and_restarted() -> None:
    source, adapters = torch.nn.Linear(8, 8), {name: Held(torch.nn.Linear(8, 8)) for name in ("done", "half-done")}
    with ExitStack() as owned, ThreadPoolExecutor(1) as pool:
        child, address = owned.enter_context(process())
        trainer = owned.enter_context(Trainer(source, address.url))
        engines = {name: owned.enter_context(Engine(adapter, name, address.url)) for name, adapter in adapters.items()}
        assert trainer.publish(1, timeout=SECONDS).ok
        held = adapters["half-done"]
        held.moving.clear()
        held.go.clear()
        with torch.no_grad():
            source.weight.fill_(2.0)
        publishing = pool.submit(trainer.publish, 2, timeout=SECONDS)
        assert held.moving.wait(SECONDS)
        child.kill()
        held.go.set()
        owned.enter_context(process(address.port))
        with suppress(RoundFailed):  # or the restarted coordinator runs the round again, with who is back by then
            publishing.result(2 * SECONDS)
        with Client(ClientSettings(coordinator=address)) as client, client.events() as events:
            while {replica.name for replica in client.status().replicas if not replica.missing} != set(engines):
                next(event for event in events if isinstance(event, Joined))
            for replica in client.status().replicas:
                assert replica.version in (None, 1, 2)
                if replica.routable:
                    assert engines[replica.name].serving is not None
        with torch.no_grad():
            source.weight.fill_(3.0)
        result = trainer.publish(3, timeout=SECONDS)
        assert {replica.name: (replica.state, replica.version) for replica in result.replicas} == dict.fromkeys(
            engines, ("loaded", 3)
        )
        assert all(serves(adapter, source, 3) for adapter in adapters.values())


def test_a_restarted_trainer_goes_on_above_the_last_version(server: BackgroundServer) -> None:
    source, adapter = torch.nn.Linear(8, 8), Held(torch.nn.Linear(8, 8))
    with Engine(adapter, "one", server.url, token=server.token):
        with Trainer(source, server.url, token=server.token) as trainer:
            assert trainer.publish(7, timeout=SECONDS).ok
        fresh = torch.nn.Linear(8, 8)  # from an older checkpoint
        with Trainer(fresh, server.url, token=server.token) as trainer:
            with pytest.raises(VersionError, match="last one is 7"):
                trainer.publish(3, timeout=SECONDS)
            assert serves(adapter, source, 7)
            assert trainer.publish(8, timeout=SECONDS).ok
            assert serves(adapter, fresh, 8)


class _OfAnEarlierCoordinator(PublishRequests):
    def __init__(self, mode: PauseMode | None) -> None:
        super().__init__(mode)
        self.count = 2
        self.start_after(2)


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_rank_that_reaches_a_restarted_coordinator_before_the_others_counts_as_they_do(
    server: BackgroundServer, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Nobody is there to say what the run has counted, and the program does not publish again after an error."""
    source, adapter = torch.nn.Linear(8, 8), Held(torch.nn.Linear(8, 8))
    with ExitStack() as owned, ThreadPoolExecutor(2) as pool:
        trainers = {1: owned.enter_context(Trainer(source, server.url, token=server.token, rank=1, world_size=2))}
        monkeypatch.setattr(weightsync.trainer.trainer, "PublishRequests", _OfAnEarlierCoordinator)
        trainers[0] = owned.enter_context(Trainer(source, server.url, token=server.token, rank=0, world_size=2))
        owned.enter_context(Engine(adapter, "one", server.url, token=server.token))
        for number in range(2):
            early = pool.submit(trainers[first].publish, timeout=SECONDS)
            with suppress(TimeoutError):  # it waits for the other one
                early.result(0.3)
            late = pool.submit(trainers[1 - first].publish, timeout=SECONDS)
            assert [asked.result(SECONDS).version.number for asked in (early, late)] == [number, number]
        assert [trainers[rank]._requests.count for rank in (0, 1)] == [4, 4]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each event loop wakes, by its thread's name."""
    wakes: dict[str, int] = {}
    select = selectors.DefaultSelector.select

    def counting(selector: selectors.DefaultSelector, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = select(selector, timeout)
        name = threading.current_thread().name
        wakes[name] = wakes.get(name, 0) + 1
        return found

    monkeypatch.setattr(selectors.DefaultSelector, "select", counting)
    return wakes


def test_an_idle_system_never_wakes(runtime: None, counted: dict[str, int]) -> None:
    """Heartbeats are so rare here that none falls into the time that is looked at, and no weights are read again: then nothing at
    all may happen."""
    with BackgroundServer(ServerSettings(port=0, heartbeat=60.0, audit_share=0.0)) as server, ExitStack() as owned:
        trainer = owned.enter_context(Trainer(torch.nn.Linear(8, 8), server.url, token=server.token))
        for name in ("a", "b"):
            owned.enter_context(Engine(Held(torch.nn.Linear(8, 8)), name, server.url, token=server.token))
        assert trainer.publish(1, timeout=SECONDS).ok
        threading.Event().wait(0.5)
        before = dict(counted)
        threading.Event().wait(1.0)
        woken = {name: count - before.get(name, 0) for name, count in counted.items() if count != before.get(name, 0)}
        assert "weightsync-links" in counted, "the loop of all three"
        assert "weightsync-coordinator" in counted
        assert not woken, "somebody polls, or has a timer that is none of a heartbeat"
