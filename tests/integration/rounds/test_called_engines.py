"""Engines whose framework lets updates in by a call, behind a real coordinator: calls that do not come, ranks that die inside."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
from tests.unit.engine.test_update import Half, LowerHalf
from tests.unit.engines.test_owner_call import Called, Framework, wait_until_inside

import weightsync
from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed, WeightSyncError
from weightsync.server.server import BackgroundServer

SECONDS = 20.0


class CalledUpper(Called, Half):
    """The first two rows."""


class CalledLower(Called, LowerHalf):
    """The others."""


@pytest.fixture
def server(no_leaks: None) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        yield server


@pytest.fixture
def owned(server: BackgroundServer) -> Iterator[ExitStack]:
    with ExitStack() as owned:
        yield owned


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8, thread_name_prefix="framework") as threads:
        yield threads


def module() -> torch.nn.Module:
    return torch.nn.Linear(6, 4, bias=False)


def weight(adapter: weightsync.ModuleAdapter) -> torch.Tensor:
    return dict(adapter.module.named_parameters())["weight"].detach()


@pytest.fixture
def trainer(server: BackgroundServer, owned: ExitStack) -> weightsync.Trainer:
    return owned.enter_context(weightsync.Trainer(module(), server.url, token=server.token))


def join(
    owned: ExitStack, server: BackgroundServer, adapter: Called, name: str, rank: int = 0, ranks: int = 1
) -> weightsync.Engine:
    engine = weightsync.Engine(adapter, name, server.url, token=server.token, rank=rank, world_size=ranks)
    owned.callback(adapter.aborted, "the test ended")
    return owned.enter_context(engine)


def test_a_call_that_does_not_come_fails_its_replica_alone_and_comes_late(
    server: BackgroundServer, owned: ExitStack, trainer: weightsync.Trainer, threads: ThreadPoolExecutor
) -> None:
    adapter, other = Called(module()), weightsync.ModuleAdapter(module())
    engine = join(owned, server, adapter, "owned")
    owned.enter_context(weightsync.Engine(other, "other", server.url, token=server.token))
    trainer.wait_for_replicas(2, timeout=SECONDS)
    before = weight(adapter).clone()
    result = trainer.publish(1, timeout=6)
    assert [(replica.name, "did not let the update in" in str(replica.error)) for replica in result.missed] == [("owned", True)]
    assert torch.equal(weight(adapter), before)
    assert not torch.equal(weight(other), before)
    framework = Framework(adapter, threads)
    framework.calls(1).result(SECONDS)  # the trainer's region still holds version 1
    assert torch.equal(weight(adapter), weight(other))
    assert engine.wait_for_version(1, SECONDS).number == 1
    call = framework.calls(2)
    assert trainer.publish(2, timeout=SECONDS).ok
    call.result(SECONDS)


def test_a_call_for_the_next_version_does_not_take_the_last_one(
    server: BackgroundServer, owned: ExitStack, trainer: weightsync.Trainer, threads: ThreadPoolExecutor
) -> None:
    with suppress(WeightSyncError):
        trainer.publish(1, timeout=6)  # to no replica: the region holds it, and a replica that joins is seeded
    adapter = Called(module())
    join(owned, server, adapter, "owned")
    trainer.wait_for_replicas(1, timeout=SECONDS)
    call = Framework(adapter, threads).calls(2)
    wait_until_inside(adapter)
    result = trainer.publish(2, timeout=SECONDS)
    assert result.ok
    call.result(SECONDS)
    assert adapter.said.count("resume") == 1


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "raises"])
def test_all_ranks_leave_their_calls_if_one_fails_inside(
    server: BackgroundServer, owned: ExitStack, trainer: weightsync.Trainer, threads: ThreadPoolExecutor, dies: bool
) -> None:
    upper, lower = CalledUpper(module()), CalledLower(module())
    join(owned, server, upper, "owned", 0, 2)
    rank = join(owned, server, lower, "owned", 1, 2)
    trainer.wait_for_replicas(1, timeout=SECONDS)
    if dies:
        lower.call._load = rank.close
    else:
        lower.fault = ValueError("injected")
    calls = [Framework(adapter, threads).calls(1) for adapter in (upper, lower)]
    with pytest.raises(RoundFailed, match="owned"):
        trainer.publish(1, timeout=SECONDS)
    for call in calls:
        with pytest.raises(RoundFailed, match="do not resume the engine before another update succeeds"):
            call.result(SECONDS)
    if not dies:
        lower.fault = None
        calls = [Framework(adapter, threads).calls(2) for adapter in (upper, lower)]
        assert trainer.publish(2, timeout=SECONDS).ok
        assert [call.result(SECONDS) >= 0 for call in calls] == [True, True]


def test_a_trainer_that_is_interrupted_ends_the_call_and_publishes_again(
    server: BackgroundServer, owned: ExitStack, trainer: weightsync.Trainer, threads: ThreadPoolExecutor
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start background jobs that ignore it
    owned.callback(signal.signal, signal.SIGINT, before)
    adapter = Called(module())
    join(owned, server, adapter, "owned")
    trainer.wait_for_replicas(1, timeout=SECONDS)
    left = [_thread.interrupt_main]
    adapter.call._load = lambda: left.pop()() if left else None
    call = Framework(adapter, threads).calls(1)
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(1, timeout=SECONDS)
        threading.Event().wait(SECONDS)  # the round may have ended before the signal came
    assert isinstance(call.exception(SECONDS), RoundFailed | None)
    call = Framework(adapter, threads).calls(2)
    assert trainer.publish(2, timeout=SECONDS).ok
    call.result(SECONDS)


def test_a_coordinator_that_ends_in_the_middle_ends_the_call(no_leaks: None, threads: ThreadPoolExecutor) -> None:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ExitStack() as owned:
        trainer = owned.enter_context(weightsync.Trainer(module(), server.url, token=server.token))
        adapter = Called(module())
        engine = join(owned, server, adapter, "owned")
        trainer.wait_for_replicas(1, timeout=SECONDS)
        adapter.call._load = server.stop
        call = Framework(adapter, threads).calls(1)
        publishing = threads.submit(trainer.publish, 1, timeout=6)
        with pytest.raises(RoundFailed, match="do not resume the engine"):
            call.result(SECONDS)
        assert isinstance(publishing.exception(SECONDS), WeightSyncError)
        assert engine.serving is None
