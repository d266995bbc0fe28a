"""Trainer ranks that publish together over a real coordinator: blinks, failures, numbers, epochs, and who is waited for."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.faults.relay import Relay
from tests.integration.pauses import NotesPauses

from weightsync.config import ClientSettings, ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    ManifestMismatch,
    RoundFailed,
    VersionError,
)
from weightsync.protocol.connection import ConnectionLost
from weightsync.protocol.messages import Place, Publish, RoundResult
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import Placing, TrainerRole

SECONDS = 20.0

pytestmark = pytest.mark.usefixtures("no_leaks")


class Run:
    """A coordinator, and agents that are closed at the end."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.stack = stack
        self.server = stack.enter_context(BackgroundServer(ServerSettings.load({}, port=0, **settings)))

    def trainer(self, state: torch.nn.Module, url: str | None = None, **settings: Any) -> Trainer:
        return self.stack.enter_context(Trainer(state, url or self.server.url, token=self.server.token, **settings))

    def engine(self, module: torch.nn.Module, name: str = "r") -> Engine:
        return self.stack.enter_context(Engine(ModuleAdapter(module), name, self.server.url, token=self.server.token))

    def relayed(self) -> tuple[Relay, str]:
        """A relay before the coordinator, and the coordinator's URL behind it."""
        relay = self.stack.enter_context(Relay.made())
        port = self.server.address.port
        asyncio.run_coroutine_threadsafe(relay._listen(port), relay._loop).result(SECONDS)
        return relay, f"http://{relay.known_as}:{port}"


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def linear(**settings: Any) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(6, 5, **settings)


def together(trainers: list[Trainer], *numbers: int | None) -> list[RoundResult | BaseException]:
    """Every rank publishes, in a thread of its own."""
    with ThreadPoolExecutor(len(trainers)) as pool:
        asked = [pool.submit(trainer.publish, number, timeout=SECONDS) for trainer, number in zip(trainers, numbers, strict=True)]
        return [one.exception(SECONDS) or one.result() for one in asked]


@pytest.mark.parametrize("streams", [False, True])
def test_each_way_to_publish_says_what_the_pause_does_to_running_requests(run: Run, streams: bool) -> None:
    source = linear()
    adapter = NotesPauses(linear())
    run.stack.enter_context(Engine(adapter, "r", run.server.url, token=run.server.token))
    trainer = run.stack.enter_context(
        Trainer(Stream() if streams else source, run.server.url, token=run.server.token, pause_mode="keep")
    )
    trainer.wait_for_replicas(1, SECONDS)
    if streams:
        trainer.publish_stream(iter(source.state_dict().items()), timeout=SECONDS)
        trainer.publish_stream(iter(source.state_dict().items()), timeout=SECONDS, pause_mode="wait")
    else:
        trainer.publish(timeout=SECONDS)
        trainer.publish_async(timeout=SECONDS, pause_mode="wait").result(SECONDS)
    assert adapter.modes == ["keep", "wait"]


def test_a_pause_mode_that_does_not_exist_is_refused_at_once(run: Run) -> None:
    trainer = run.trainer(linear())
    nap: Any = "nap"
    for publish in (trainer.publish, trainer.publish_async):
        with pytest.raises(ConfigurationError, match="one of abort, wait, keep, not 'nap'"):
            publish(pause_mode=nap)
    with pytest.raises(ConfigurationError, match="one of abort, wait, keep, not 'nap'"):
        run.trainer(linear(), pause_mode=nap)


def test_a_rank_whose_connection_breaks_while_ranks_gather(run: Run) -> None:
    relay, url = run.relayed()
    module = linear()
    trainers = [run.trainer(module, url if rank == 0 else None, rank=rank, world_size=3) for rank in range(3)]
    target = torch.nn.Linear(6, 5)
    run.engine(target)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(trainers[rank].publish, 1, timeout=SECONDS) for rank in (0, 1)]
        _until(lambda: len(_gathering(run)) == 2)
        relay.drop()
        _until(lambda: not trainers[0]._link.connected)
        _until(lambda: trainers[0]._link.connected)
        asked.append(pool.submit(trainers[2].publish, 1, timeout=SECONDS))
        assert all(one.result(SECONDS).ok for one in asked)
    assert torch.equal(target.weight, module.weight)


def _gathering(run: Run) -> dict[str, Any]:
    gathering = run.server.coordinator._rendezvous._gathering
    return {} if gathering is None else gathering.places


def _is_free(lock: Any) -> bool:
    free: bool = lock.acquire(blocking=False)
    if free:
        lock.release()
    return free


def _until(holds: Any) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("it did not come to that")
        threading.Event().wait(0.005)


@pytest.mark.parametrize("step", ["shards", "offload"])
def test_a_rank_that_cannot_publish_tells_the_others(run: Run, step: str) -> None:
    called: list[str] = []

    def offload() -> None:
        called.append("offload")
        if fails:
            raise RuntimeError("no room in host memory")

    fails = step == "offload"
    modules = [linear(), linear()]
    hooks: list[dict[str, Any]] = [{}, {"offload": offload, "restore": lambda: called.append("restore")}]
    trainers = [run.trainer(modules[rank], rank=rank, world_size=2, **hooks[rank]) for rank in range(2)]
    run.engine(torch.nn.Linear(6, 5))
    weight = modules[1].weight
    if step == "shards":
        modules[1].weight = torch.nn.Parameter(torch.zeros(3, 3))
    started = time.monotonic()
    first, second = together(trainers, 1, 1)
    assert time.monotonic() - started < SECONDS / 2
    assert isinstance(first, Aborted)
    assert "trainer/1 failed before it placed its shards" in str(first)
    assert ("other tensors or shards" if step == "shards" else "no room in host memory") in str(first)
    assert isinstance(second, ConfigurationError if step == "shards" else RuntimeError)
    assert called == ["offload", "restore"]
    modules[1].weight, fails = weight, False
    assert all(isinstance(result, RoundResult) for result in together(trainers, 1, 1))


def test_a_second_thread_waits_no_longer_than_it_may(run: Run) -> None:
    trainer, adapter = run.trainer(linear()), ModuleAdapter(torch.nn.Linear(6, 5))
    run.stack.enter_context(Engine(adapter, "r", run.server.url, token=run.server.token))
    with ThreadPoolExecutor(1) as pool:
        with adapter.in_use():
            slow: Future[RoundResult] = pool.submit(trainer.publish, 1, timeout=SECONDS)
            _until(lambda: not _is_free(trainer._publishing))
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="another thread"):
                trainer.publish(2, timeout=0.2)
            assert time.monotonic() - started < 5.0
        assert slow.result(SECONDS).ok


def test_numbers_that_nobody_counts(run: Run) -> None:
    module, target = linear(), torch.nn.Linear(6, 5)
    trainer = run.trainer(module)
    known = [trainer.last_version]
    run.engine(target)
    assert trainer.wait_for_replicas(1, timeout=SECONDS) == ("r",)
    assert [trainer.publish(timeout=SECONDS).version.number for _ in range(2)] == [0, 1]
    assert trainer.publish(7, timeout=SECONDS).version.number == 7
    result = trainer.publish_async(timeout=SECONDS).result(SECONDS)
    assert (result.version.number, [*known, trainer.last_version]) == (8, [None, 8])
    assert "updated: r (installed: the digests" in str(result)
    assert torch.equal(target.weight, module.weight)


def test_a_very_long_timeout_is_one_and_an_impossible_one_is_refused(run: Run) -> None:
    """A call of more than a week is refused by the protocol: the connection was ended and made again for ever."""
    trainer = run.trainer(linear())
    run.engine(torch.nn.Linear(6, 5))
    assert trainer.wait_for_replicas(1, timeout=1_000_000)
    assert trainer.publish(timeout=1_000_000).ok
    assert trainer.publish_async(timeout=1_000_000).result(SECONDS).ok
    for call in (trainer.publish, trainer.publish_async, trainer.wait_for_replicas):
        with pytest.raises(ConfigurationError, match="at most"):
            call(timeout=1e11)


def test_ranks_that_let_the_coordinator_choose(run: Run) -> None:
    module = linear()
    trainers = [run.trainer(module, rank=rank, world_size=2) for rank in range(2)]
    run.engine(torch.nn.Linear(6, 5))
    for numbers, chosen in (((None, None), 0), ((None, 4), 4), ((None, None), 5)):
        results = together(trainers, *numbers)
        assert [result.version.number for result in results if isinstance(result, RoundResult)] == [chosen, chosen]


def test_a_trainer_that_goes_on_from_an_earlier_checkpoint(run: Run) -> None:
    module = linear()
    engine = run.engine(torch.nn.Linear(6, 5))
    with run.trainer(module, new_epoch=True) as first:
        first.publish(440, timeout=SECONDS)
    with run.trainer(module) as second:
        assert second.last_version == 440
        with pytest.raises(VersionError, match=r"last one is 440.*new_epoch=True"):
            second.publish(400, timeout=SECONDS)
    with run.trainer(module, new_epoch=True) as third:
        assert third.last_version is None
        assert [str(third.publish(number, timeout=SECONDS).version).split(".")[1] for number in (400, 401)] == ["2@400", "2@401"]
        assert third._hello().epoch == 2, "a coordinator that starts again hears of it"
    assert engine.serving is not None
    assert engine.serving.order == (2, 401)


def test_a_publication_of_unchanged_weights_is_named_once_in_a_row(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    module = linear()
    run.engine(torch.nn.Linear(6, 5))
    with run.trainer(module) as trainer, caplog.at_level("WARNING", "weightsync"):
        for change in (0, 0, 0, 1, 0):
            with torch.no_grad():
                module.weight += change
            trainer.publish(timeout=SECONDS)
    warned = [record.message for record in caplog.records if "same digest" in record.message]
    assert [message.split(":")[0].rpartition("@")[2] for message in warned] == ["0", "3"], warned


def test_waiting_for_replicas_says_for_whom(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    trainer = run.trainer(linear())
    with pytest.raises(DeadlineExceeded, match=r"waited 2\.[45]\d* s for 1 replica"):
        trainer.wait_for_replicas(1, timeout=2.5)
    assert "waiting for 1 replica (ready: none)" in caplog.text
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trainer.wait_for_replicas, 1, SECONDS)
        run.engine(torch.nn.Linear(6, 5))
        assert asked.result(SECONDS) == ("r",)


def test_connecting_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_CONNECT_TIMEOUT", "1")
    monkeypatch.setattr("weightsync.protocol.connection.NOTICE_SECONDS", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(CoordinatorUnreachable):
        Trainer(linear(), f"http://127.0.0.1:{port}", token="t" * 40)
    assert f"waiting for the coordinator at http://127.0.0.1:{port} (" in caplog.text


def test_an_engine_that_does_not_fit_learns_of_it_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        run = Run(stack, require="all")
        run.engine(torch.nn.Linear(6, 5, dtype=torch.bfloat16), "odd")
        run.engine(torch.nn.Linear(6, 5), "even")
        trainer = run.trainer(linear())
        assert trainer.wait_for_replicas(1, timeout=SECONDS) == ("even",)
        with pytest.raises(RoundFailed, match=r"1 of 2 replicas.*odd: ManifestMismatch[\s\S]*dtype=torch.bfloat16"):
            trainer.publish(1, timeout=SECONDS)
        _until(lambda: "odd/0: rounds skip this engine" in caplog.text)
        logged = {record.name for record in caplog.records if "odd" in record.getMessage() and record.levelno == logging.WARNING}
        assert logged == {"weightsync.coordinator.coordinator", "weightsync.protocol.connection", "weightsync.trainer.trainer"}
        with pytest.raises(ManifestMismatch, match=r"dtype=torch\.bfloat16"):
            run.engine(torch.nn.Linear(6, 5, dtype=torch.bfloat16), "late")
        trainer.close()
        fitting = run.trainer(linear(), dtype=torch.bfloat16)
        _until(lambda: not fitting._link.connected or fitting.wait_for_replicas(1, timeout=SECONDS) == ("odd",))
        with pytest.raises(RoundFailed, match="even: ManifestMismatch"):
            fitting.publish(2, timeout=SECONDS)


def test_a_round_that_failed_right_after_the_copy_is_told_by_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Placing.wait

    def sleeps_in(placing: Placing, timeout: float) -> bool:
        came = wait(placing, timeout)
        time.sleep(1.0)  # the round is over before the caller's thread runs again
        return came

    monkeypatch.setattr(Placing, "wait", sleeps_in)
    with ExitStack() as stack:
        run = Run(stack, require="all")
        run.engine(torch.nn.Linear(6, 5, dtype=torch.bfloat16), "odd")
        future = run.trainer(linear()).publish_async(1, timeout=SECONDS)
        with pytest.raises(RoundFailed, match="odd: ManifestMismatch"):
            future.result(SECONDS)


def test_a_publication_that_is_asked_for_again_keeps_its_number_though_another_one_is_armed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks while ``publish_async`` waits for a round, and the next publication has begun already."""
    trainer, asked = run.trainer(linear()), []
    role = trainer._role
    assert isinstance(role, TrainerRole)
    first = role.arm(1, None)
    role.handle(Place(4, 1, 1), SECONDS)
    role.arm(2, None)

    def call(body: Publish, timeout: float) -> None:
        asked.append(body.placed)
        raise ConnectionLost("broken") if len(asked) == 1 else Aborted("the second answer does not matter")

    monkeypatch.setattr(trainer._link, "call", call)
    with pytest.raises(Aborted):
        trainer._ask(Publish(), Deadline(SECONDS), first)
    assert asked == [4, 4]


def test_an_engine_that_stays_is_refused_by_a_new_coordinator_and_listed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    relay, url = run.relayed()
    odd = Engine(ModuleAdapter(torch.nn.Linear(6, 5, dtype=torch.bfloat16)), "odd", url, token=run.server.token)
    run.stack.enter_context(odd)
    trainer = run.trainer(linear())
    caplog.clear()
    relay.drop()  # it connects again while the trainer is there
    _until(lambda: "odd/0: rounds leave this rank out" in caplog.text)
    with pytest.raises(RoundFailed, match="odd: ManifestMismatch"):
        trainer.publish(1, timeout=SECONDS)
    assert odd._link.connected


def test_a_trainers_own_coordinator_takes_no_other_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.delenv("WEIGHTSYNC_COORDINATOR", raising=False)
        monkeypatch.setattr("weightsync.config.DEFAULT_PORT", taken.getsockname()[1])
        monkeypatch.setenv("WEIGHTSYNC_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigurationError, match=r"port \d+: Address already in use\. Another coordinator.*WEIGHTSYNC_PORT"):
            Trainer(linear())


def test_a_trainer_that_may_not_start_a_coordinator_looks_for_the_one_of_this_machine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSYNC_COORDINATOR", raising=False)
    monkeypatch.setattr("weightsync.server.server.BackgroundServer", None)  # not called
    load = ClientSettings.load

    def as_on_this_machine(**given: object) -> ClientSettings:
        assert given["coordinator"] is None
        return load(**{**given, "coordinator": run.server.url})

    monkeypatch.setattr(ClientSettings, "load", as_on_this_machine)
    with Trainer(linear(), token=run.server.token, start_coordinator=False) as trainer:
        assert trainer.coordinator == run.server.url


def test_garbage_is_collected_while_a_round_runs_in_the_trainers_process(run: Run) -> None:
    trainer, adapter = run.trainer(linear()), ModuleAdapter(torch.nn.Linear(6, 5))
    run.stack.enter_context(Engine(adapter, "r", run.server.url, token=run.server.token))
    with adapter.in_use():
        result = trainer.publish_async(1, timeout=SECONDS)
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 0
    assert result.result(SECONDS).ok
