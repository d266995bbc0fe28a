"""Streams over a real coordinator: one-shot iterators to receivers and engines, and what fails on both sides."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.streams import stream_ranks
from tests.integration.streams.odd_tensors import Wrapper, freed
from tests.integration.streams.stream_world import SECONDS, SMALL, WINDOW, Tensors, World, lent, received, same, weights

from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    ManifestMismatch,
    RoundFailed,
    VersionError,
    WeightSyncError,
)
from weightsync.model import PauseMode
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream, StreamedPublication

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0, require="any")) as running:
        yield running


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world(server: BackgroundServer, owned: ExitStack) -> World:
    return World(server, owned)


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
def test_every_tensor_arrives_in_every_round(world: World, transport: str) -> None:
    trainer = world.trainer(transports=[transport])
    receivers = [world.receiver(name, transports=[transport]) for name in ("r0", "r1")]
    trainer.wait_for_replicas(2, SECONDS)
    for seed in range(2):
        coming = [world.receive(receiver) for receiver in receivers]
        result = trainer.publish_stream(lent(weights(seed)), step=40 + seed, timeout=SECONDS)
        assert all(same(future.result(SECONDS), weights(seed)) for future in coming)
        assert (result.version.number, result.step, [replica.error for replica in result.replicas]) == (
            seed,
            40 + seed,
            [None, None],
        )
        assert {replica.verified for replica in result.replicas} == {"received"}
        assert {replica.transports for replica in result.replicas} == {(transport,)}
        assert [receiver.serving for receiver in receivers] == [result.version] * 2
        assert all(replica.nbytes == sum(t.nbytes for t in weights(seed).values()) for replica in result.replicas)


@pytest.mark.parametrize(("windows", "order"), [(2, (0, 1, 2)), (5, (0, 1, 2)), (2, (2, 0, 1))])
def test_ranks_share_the_windows_and_every_rank_iterates_to_the_end(world: World, windows: int, order: Sequence[int]) -> None:
    stream = Stream(window_bytes=WINDOW, windows=windows)
    joined = {rank: world.trainer(stream, rank, 3) for rank in order}
    trainers = [joined[rank] for rank in range(3)]
    receiver = world.receiver()
    drained = [0, 0, 0]

    def tensors(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for item in lent(weights(5)):
            drained[rank] += 1
            yield item

    coming = world.receive(receiver)
    asked = [world.pool.submit(trainer.publish_stream, tensors(rank), timeout=SECONDS) for rank, trainer in enumerate(trainers)]
    assert len({future.result(SECONDS).version for future in asked}) == 1
    assert same(coming.result(SECONDS), weights(5))
    assert drained == [len(weights(5))] * 3


def test_a_module_takes_part_and_what_its_parameters_hold_is_verified(world: World, owned: ExitStack) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 60, bias=False)).requires_grad_(False)
    owned.enter_context(Engine(ModuleAdapter(net), "engine", world.server.url, token=world.server.token))
    trainer = world.trainer(dtype={"0.bias": torch.float32})
    wanted = {name: torch.randn_like(value) for name, value in net.state_dict().items()}
    sent = {name: value.double() if name == "0.bias" else value for name, value in wanted.items()}
    result = trainer.publish_stream(lent(sent), timeout=SECONDS)
    assert [replica.verified for replica in result.replicas] == ["installed"]
    assert same(dict(net.state_dict()), wanted)


@pytest.mark.parametrize("case", ["unknown", "missing", "shape", "dtype"])
def test_an_engine_refuses_other_tensors_than_its_own(world: World, owned: ExitStack, case: str) -> None:
    net = torch.nn.Linear(4, 5)
    owned.enter_context(Engine(ModuleAdapter(net), "engine", world.server.url, token=world.server.token))
    trainer, receiver = world.trainer(), world.receiver()
    trainer.wait_for_replicas(2, SECONDS)
    sent = {"weight": torch.zeros(5, 4), "bias": torch.zeros(5)}
    changed: dict[str, Tensors] = {
        "unknown": {"head": torch.zeros(1)},
        "missing": {},
        "shape": {"bias": torch.zeros(6)},
        "dtype": {"bias": torch.zeros(5).half()},
    }
    sent |= changed[case]
    if case == "missing":
        del sent["bias"]
    coming = world.receive(receiver)
    result = trainer.publish_stream(lent(sent), timeout=SECONDS)
    assert same(coming.result(SECONDS), sent)  # the others finish
    failed = {replica.name: replica for replica in result.replicas}["engine"]
    assert failed.state == "dirty" and "ManifestMismatch" in str(failed.error)


def test_dtypes_are_converted_by_name_or_all_at_once(world: World) -> None:
    receiver = world.receiver()
    tensors = {"w": torch.randn(5), "router": torch.randn(3), "ids": torch.arange(4)}
    with world.trainer(dtype=torch.bfloat16) as trainer:
        coming = world.receive(receiver)
        trainer.publish_stream(lent(tensors), timeout=SECONDS)
        arrived = coming.result(SECONDS)
        assert {name: str(tensor.dtype) for name, tensor in arrived.items()} == {
            "w": "torch.bfloat16", "router": "torch.bfloat16", "ids": "torch.int64"
        }  # fmt: skip
    trainer = world.trainer(dtype={"w": torch.bfloat16})
    coming = world.receive(receiver)
    trainer.publish_stream(lent(tensors), timeout=SECONDS)
    assert same(coming.result(SECONDS), {**tensors, "w": tensors["w"].bfloat16()})


def test_batches_are_awaited_in_any_event_loop(world: World) -> None:
    trainer, receiver = world.trainer(), world.receiver()

    async def collect() -> Tensors:
        return {name: tensor.clone() async for batch in receiver.receive_async(SECONDS) for name, tensor in batch}

    for seed in range(2):
        coming = world.pool.submit(asyncio.run, collect())
        trainer.publish_stream(lent(weights(seed)), timeout=SECONDS)
        assert same(coming.result(SECONDS), weights(seed))


def test_receivers_come_and_go_and_numbers_go_on_after_a_restart_of_the_trainer(world: World) -> None:
    first = world.receiver("first")
    with world.trainer() as trainer:
        coming = world.receive(first)
        trainer.publish_stream(lent(weights(0)), 41, timeout=SECONDS)
        assert same(coming.result(SECONDS), weights(0))
    first.close()
    second, third = world.receiver("second"), world.receiver("third")
    trainer = world.trainer()
    assert trainer.last_version == 41
    coming, other = world.receive(second), world.receive(third)
    result = trainer.publish_stream(lent(weights(1)), timeout=SECONDS)
    assert result.version.number == 42 and [replica.name for replica in result.replicas] == ["second", "third"]
    assert same(coming.result(SECONDS), weights(1)) and same(other.result(SECONDS), weights(1))


# Failures.


def failing(tensors: Tensors, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, item in enumerate(lent(tensors)):
        if index == after:
            raise OSError("no gather")
        yield item


@pytest.mark.parametrize("after", [0, 20])
def test_a_generator_that_raises_ends_on_all_ranks_and_in_all_receivers(world: World, after: int) -> None:
    trainers = [world.trainer(rank=rank, world_size=2) for rank in range(2)]
    receivers = [world.receiver("r0"), world.receiver("r1")]
    trainers[0].wait_for_replicas(2, SECONDS)
    for seed in range(2):
        coming = [world.receive(receiver) for receiver in receivers]
        tensors = [lent(weights(seed)) if seed else failing(weights(seed), after), lent(weights(seed))]
        asked = [
            world.pool.submit(trainer.publish_stream, items, timeout=SECONDS)
            for trainer, items in zip(trainers, tensors, strict=True)
        ]
        if seed:  # the same number: the first one never became a version
            assert [future.result(SECONDS).version.number for future in asked] == [0, 0]
            assert all(same(future.result(SECONDS), weights(seed)) for future in coming)
            continue
        with pytest.raises(OSError, match="no gather"):
            asked[0].result(SECONDS)
        with pytest.raises(Aborted, match=r"trainer rank 0 raised.*no gather"):
            asked[1].result(SECONDS)
        assert next(tensors[1], None) is None  # it was drained
        for future in coming:
            with pytest.raises(RoundFailed, match="no gather"):
                future.result(SECONDS)


def test_a_generator_that_raises_before_the_first_window_was_sent_pauses_no_engine(world: World, owned: ExitStack) -> None:
    net = torch.nn.Linear(4, 5).requires_grad_(False)
    engine = owned.enter_context(Engine(ModuleAdapter(net), "engine", world.server.url, token=world.server.token))
    trainer = world.trainer()
    version = trainer.publish_stream(lent(dict(net.state_dict())), timeout=SECONDS).version
    with pytest.raises(OSError, match="no gather"):
        trainer.publish_stream(failing(dict(net.state_dict()), 1), timeout=SECONDS)
    assert engine.serving == version and engine.wait_for_version(version, 1.0) == version


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([], ConfigurationError, "no bytes"),
        ([("w", torch.zeros(0))], ConfigurationError, "no bytes"),
        ([("w", torch.zeros(2)), ("w", torch.zeros(2))], ManifestMismatch, "twice"),
        ([("w", torch.zeros(2)), ("w", torch.zeros(3))], ManifestMismatch, "two different"),
        ([("w", torch.zeros(2)), ("x", [1.0])], ConfigurationError, "a name and a tensor"),
        ([("w", torch.zeros(2)), ("x", torch.zeros(2, device="meta"))], ConfigurationError, "meta"),
        ([("w", torch.zeros(2)), ("x", freed())], ConfigurationError, "freed"),
        ([("w", torch.zeros(2)), ("x", Wrapper(torch.zeros(2)))], ConfigurationError, "wraps other tensors"),
        ([("w", torch.zeros(2)), ("x", torch.zeros(2, dtype=torch.complex64))], ConfigurationError, "cannot be published"),
        ([("w\n", torch.zeros(2))], ConfigurationError, "printable"),
    ],
)
def test_what_cannot_be_published_is_refused_after_the_iterator_was_drained(
    world: World, items: list[Any], error: type[Exception], message: str
) -> None:
    trainer, receiver = world.trainer(), world.receiver()
    for _ in range(2):
        coming = world.receive(receiver)
        left = iter(items)
        with pytest.raises(error, match=message):
            trainer.publish_stream(left, timeout=SECONDS)
        assert next(left, None) is None
        with pytest.raises(RoundFailed):
            coming.result(SECONDS)
    coming = world.receive(receiver)
    trainer.publish_stream(lent(weights(1)), timeout=SECONDS)
    assert same(coming.result(SECONDS), weights(1))


def test_ranks_that_iterate_over_different_tensors_fail_together(world: World) -> None:
    trainers = [world.trainer(rank=rank, world_size=2) for rank in range(2)]
    other = weights(0)
    other["embed"] = other["embed"].float()
    asked = [
        world.pool.submit(trainer.publish_stream, lent(tensors), timeout=SECONDS)
        for trainer, tensors in zip(trainers, (weights(0), other), strict=True)
    ]
    for future in asked:
        with pytest.raises(WeightSyncError, match=r"same tensors|twice, or as two|middle of"):
            future.result(SECONDS)


@pytest.mark.parametrize("act", ["leave", "raise", "close"])
def test_a_receiver_that_stops_in_the_middle_fails_alone(world: World, act: str) -> None:
    trainer = world.trainer()
    stopping, going = world.receiver("stopping"), world.receiver("going")
    trainer.wait_for_replicas(2, SECONDS)

    def stop() -> None:
        for batch in stopping.receive(SECONDS):
            del batch
            if act == "raise":
                raise OSError("no room")
            if act == "close":
                stopping.close()
            return

    coming, stopped = world.receive(going), world.pool.submit(stop)
    result = trainer.publish_stream(lent(weights(3)), timeout=SECONDS)
    assert same(coming.result(SECONDS), weights(3))
    errors = {replica.name: replica.error for replica in result.replicas}
    assert errors["going"] is None and errors["stopping"]
    if act == "raise":
        with pytest.raises(OSError, match="no room"):
            stopped.result(SECONDS)
    if act != "close":  # it takes the next publication
        again = [world.receive(stopping), world.receive(going)]
        trainer.publish_stream(lent(weights(4)), timeout=SECONDS)
        assert all(same(future.result(SECONDS), weights(4)) for future in again)


def test_a_receiver_that_hangs_holds_the_others_up_for_half_of_the_time_at_most(world: World) -> None:
    trainer = world.trainer()
    hanging, going = world.receiver("hanging"), world.receiver("going")
    trainer.wait_for_replicas(2, SECONDS)
    free = threading.Event()

    def hang() -> None:
        for _ in hanging.receive(SECONDS):
            free.wait(SECONDS)

    coming, hung = world.receive(going), world.pool.submit(hang)
    started = time.monotonic()
    result = trainer.publish_stream(lent(weights(3)), timeout=6.0)
    assert time.monotonic() - started < 6.0
    free.set()
    assert same(coming.result(SECONDS), weights(3))
    errors = {replica.name: replica.error for replica in result.replicas}
    assert errors["going"] is None and "DeadlineExceeded" in str(errors["hanging"])
    with pytest.raises(RoundFailed):
        hung.result(SECONDS)


def test_a_late_receiver_waits_for_the_next_publication(world: World) -> None:
    trainer, early = world.trainer(), world.receiver("early")
    coming = world.receive(early)
    trainer.publish_stream(lent(weights(0)), timeout=SECONDS)
    coming.result(SECONDS)
    late = world.receiver("late")
    with pytest.raises(DeadlineExceeded):
        received(late, 0.5)
    coming, other = world.receive(early), world.receive(late)
    trainer.publish_stream(lent(weights(1)), timeout=SECONDS)
    assert same(coming.result(SECONDS), weights(1)) and same(other.result(SECONDS), weights(1))


def test_a_rank_that_does_not_come_ends_the_others_and_they_drain(world: World) -> None:
    trainers = [world.trainer(rank=rank, world_size=2) for rank in range(2)]
    left = lent(weights(0))
    with pytest.raises(DeadlineExceeded):
        trainers[0].publish_stream(left, timeout=1.0)
    assert next(left, None) is None


def test_a_coordinator_that_dies_in_the_middle_ends_both_sides(owned: ExitStack) -> None:
    server = BackgroundServer(ServerSettings.load({}, port=0))
    server.__enter__()
    world = World(server, owned)
    trainer, receiver = world.trainer(), world.receiver()
    drained = 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal drained
        for item in lent(weights(0)):
            drained += 1
            if drained == 15:
                server.__exit__(None, None, None)
            yield item

    coming = world.receive(receiver)
    with pytest.raises(WeightSyncError):
        trainer.publish_stream(tensors(), timeout=5.0)
    assert drained == len(weights(0))
    with pytest.raises(RoundFailed):
        coming.result(SECONDS)


def test_a_trainer_rank_that_dies_in_the_middle_ends_the_others(world: World) -> None:
    trainers = [world.trainer(rank=rank, world_size=2) for rank in range(2)]
    receiver = world.receiver()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(lent(weights(0))):
            if index == 15:
                trainers[1].close()
            yield item

    coming = world.receive(receiver)
    asked = [world.pool.submit(trainers[0].publish_stream, lent(weights(0)), timeout=SECONDS)]
    asked.append(world.pool.submit(trainers[1].publish_stream, tensors(), timeout=SECONDS))
    for future in asked:
        with pytest.raises(WeightSyncError):
            future.result(SECONDS)
    with pytest.raises(RoundFailed):
        coming.result(SECONDS)


def test_replicas_that_may_not_be_out_of_service_together_refuse_a_stream(owned: ExitStack) -> None:
    settings = ServerSettings.load({}, port=0, max_unavailable=1)
    with BackgroundServer(settings) as server:
        world = World(server, owned)
        trainer = world.trainer()
        for name in ("r0", "r1"):
            world.receiver(name)
        trainer.wait_for_replicas(2, SECONDS)
        with pytest.raises(ConfigurationError, match="max_unavailable"):
            trainer.publish_stream(lent(weights(0)), timeout=SECONDS)


@pytest.mark.timeout(180)
def test_real_ranks_gather_to_the_end_and_the_others_finish_when_a_receiver_is_killed(
    server: BackgroundServer, tmp_path: Path
) -> None:
    run_ranks(server, tmp_path)


def run_ranks(server: BackgroundServer, folder: Path, *how: str) -> None:
    """Run :mod:`tests.integration.streams.stream_ranks`, and check what the processes published and received."""
    environment = {**os.environ, "WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token}
    command = [sys.executable, "-m", "tests.integration.streams.stream_ranks", str(folder), *how]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for number in range(stream_ranks.ROUNDS):
        results = {(folder / f"result-{number}-{rank}").read_text() for rank in range(2)}
        [(version, step, *good)] = [result.split() for result in results]
        assert (version.partition("@")[2], step, good) == (str(number), str(10 * number), ["r0"] if number else ["r0", "r1"])
        wanted = {name: tensor.float() for name, tensor in stream_ranks.model(number).state_dict().items()}
        for name in good:
            with np.load(folder / f"{name}-{number}.npz") as arrays:
                assert same({key: torch.from_numpy(arrays[key]) for key in arrays}, wanted)


# Misuse.


def test_streams_and_modules_do_not_mix(world: World) -> None:
    trainer = world.trainer()
    with pytest.raises(ConfigurationError, match="publish_stream"):
        trainer.publish(timeout=SECONDS)
    trainer.close()
    module = world.trainer({"w": torch.zeros(3)})
    with pytest.raises(ConfigurationError, match="Stream"):
        module.publish_stream(lent(weights(0)), timeout=SECONDS)
    with pytest.raises(ManifestMismatch, match="publishes shards"):
        world.receiver()


def test_an_engine_that_asks_for_direct_delivery_is_refused(world: World) -> None:
    world.trainer()
    with pytest.raises(ConfigurationError, match="loaders"):
        Engine(ModuleAdapter(torch.nn.Linear(2, 2)), "e", world.server.url, token=world.server.token, delivery="direct")


def test_a_used_number_is_refused_after_the_iterator_was_drained(world: World) -> None:
    trainer, receiver = world.trainer(), world.receiver()
    coming = world.receive(receiver)
    trainer.publish_stream(lent(weights(0)), 5, timeout=SECONDS)
    coming.result(SECONDS)
    left = lent(weights(0))
    with pytest.raises(VersionError):
        trainer.publish_stream(left, 5, timeout=SECONDS)
    assert next(left, None) is None


def test_a_receiver_waits_as_long_as_the_environment_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_VERSION_TIMEOUT", "0.2")
    world.trainer()
    receiver = world.receiver()
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        next(receiver.receive())


def test_one_loop_receives(world: World) -> None:
    world.trainer()
    receiver = world.receiver()
    first = world.pool.submit(received, receiver, 3.0)
    with receiver._handover._changed:
        assert receiver._handover._changed.wait_for(lambda: receiver._handover._taker, SECONDS)
    with pytest.raises(ConfigurationError, match="already"):
        next(receiver.receive(1.0))
    receiver.close()
    with pytest.raises(Aborted):
        first.result(SECONDS)


@pytest.mark.parametrize(
    "make",
    [lambda: Stream(window_bytes=10), lambda: Stream(windows=1), lambda: Stream(windows=65), lambda: Stream(device="cpu")],
)
def test_a_stream_checks_its_arguments(make: Callable[[], Stream]) -> None:
    with pytest.raises(ConfigurationError):
        make()


class Slow(ModuleAdapter):
    """Pauses when the test lets it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.pausing, self.may_pause = threading.Event(), threading.Event()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.pausing.set()
        assert self.may_pause.wait(SECONDS)


def test_windows_of_an_interrupted_stream_and_of_the_next_one_are_never_mixed(
    world: World, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook while the ring of windows is full, and the cell is run again: the first round still runs."""
    net = torch.nn.Sequential(*(torch.nn.Linear(31, 31) for _ in range(12))).requires_grad_(False)
    adapter = Slow(net)
    engine = owned.enter_context(Engine(adapter, "engine", world.server.url, token=world.server.token))
    trainer = world.trainer()
    trainer.wait_for_replicas(1, SECONDS)
    olds = {name: torch.full_like(value, 1.0) for name, value in net.state_dict().items()}
    news = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
    wait = StreamedPublication._wait

    def interrupted(publication: StreamedPublication, ready: Callable[[], bool], deadline: Deadline, what: str) -> None:
        if publication.stamp == 1 and what == "waiting for readers" and not ready():
            publication._changed.wait_for(lambda: False, 0.5)  # until the coordinator has every window of the ring and waits, too
            assert adapter.pausing.is_set() and not publication._full
            raise KeyboardInterrupt
        wait(publication, ready, deadline, what)

    monkeypatch.setattr(StreamedPublication, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.publish_stream(lent(olds), timeout=SECONDS)
    again = world.pool.submit(trainer.publish_stream, lent(news), timeout=SECONDS)
    time.sleep(0.3)
    adapter.may_pause.set()
    result = again.result(SECONDS)
    assert [replica.error for replica in result.replicas] == [None]
    assert engine.serving == result.version
    assert same(dict(net.state_dict()), news)


@pytest.mark.parametrize("case", ["closed", "no time", "number", "step", "module"])
def test_the_iterator_is_drained_even_if_nothing_can_be_published(world: World, case: str) -> None:
    """On one rank, perhaps: the others are in a gather."""
    trainer = world.trainer({"w": torch.zeros(3)} if case == "module" else SMALL)
    if case == "closed":
        trainer.close()
    left = lent(weights(0))
    with pytest.raises(WeightSyncError):
        trainer.publish_stream(
            left, -1 if case == "number" else None, step=0.5 if case == "step" else None,  # type: ignore[arg-type]
            timeout=0.0 if case == "no time" else SECONDS,
        )  # fmt: skip
    assert next(left, None) is None
