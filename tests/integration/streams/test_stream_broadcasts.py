"""Streams whose windows are broadcast, over a real coordinator: who leaves, stops or hangs, and groups that stay.

Over gloo, and over the sockets that stand in for NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.transports.broadcast_groups import groups
from tests.integration.streams import test_streams
from tests.integration.streams.stream_world import SECONDS, Tensors, World, lent, same, weights
from tests.integration.streams.test_streams import failing

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engine.receiver import Receiver
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed, WeightSyncError
from weightsync.protocol.messages import Traits
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync.transports.broadcast import sender
from weightsync.transports.broadcast.collective import Collective
from weightsync.transports.broadcast.transport import Broadcast

__all__ = ["groups"]

Made = Callable[[], Broadcast]


def collective() -> Broadcast:
    return Collective()


def nccl() -> Broadcast:
    from tests.contract.transports.nccl_on_cpu import NcclOnCpu

    class NcclToHost(NcclOnCpu):
        """Host memory stands in for the GPU's."""

        traits = Traits(digests="after", shared_fate=True)

    return NcclToHost()


WIRES = [
    pytest.param(collective, id="collective"),
    pytest.param(nccl, id="nccl", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")),
]


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0, require="any")) as running:
        yield running


@pytest.fixture
def world(server: BackgroundServer) -> Iterator[World]:
    with ExitStack() as owned:
        yield World(server, owned)


def assert_arrives(world: World, trainer: Trainer, receivers: list[Receiver], sent: Tensors) -> None:
    coming = [world.receive(receiver) for receiver in receivers]
    assert trainer.publish_stream(lent(sent), timeout=SECONDS).ok
    assert all(same(future.result(SECONDS), sent) for future in coming)


@pytest.mark.parametrize("make", WIRES)
def test_each_trainer_rank_connects_one_group_for_all_publications(world: World, make: Made, groups: list[int]) -> None:
    trainers = [world.trainer(rank=rank, world_size=2, transports=[make()]) for rank in range(2)]
    receivers = [world.receiver(name, transports=[make()]) for name in ("r0", "r1", "r2")]
    trainers[0].wait_for_replicas(3, SECONDS)
    for seed in range(2):
        coming = [world.receive(receiver) for receiver in receivers]
        asked = [world.pool.submit(trainer.publish_stream, lent(weights(seed)), timeout=SECONDS) for trainer in trainers]
        result = asked[0].result(SECONDS)
        assert all(same(future.result(SECONDS), weights(seed)) for future in coming)
        assert [(one.error, one.transports) for one in result.replicas] == [(None, (make().name,))] * 3
    assert groups == [3, 3]


@pytest.mark.parametrize("make", WIRES)
def test_a_module_and_a_receiver_share_windows(world: World, make: Made) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 50) for _ in range(3))).requires_grad_(False)
    sent = {name: torch.randn_like(value) for name, value in net.state_dict().items()}
    with Engine(ModuleAdapter(net), "engine", world.server.url, token=world.server.token, transports=[make()]):
        trainer, receiver = world.trainer(transports=[make()]), world.receiver(transports=[make()])
        trainer.wait_for_replicas(2, SECONDS)
        coming = world.receive(receiver)
        result = trainer.publish_stream(lent(sent), timeout=SECONDS)
        assert same(coming.result(SECONDS), sent)
        assert same(dict(net.state_dict()), sent)
        assert {one.name: one.verified for one in result.replicas} == {"engine": "installed", "r0": "received"}


@pytest.mark.parametrize("make", WIRES)
@pytest.mark.parametrize("act", ["raise", "close"])
def test_a_receiver_that_stops_in_the_middle_fails_alone(world: World, make: Made, act: str) -> None:
    trainer = world.trainer(transports=[make()])
    stopping, *going = (world.receiver(name, transports=[make()]) for name in ("stopping", "r1", "r2"))
    trainer.wait_for_replicas(3, SECONDS)

    def stop() -> None:
        for batch in stopping.receive(SECONDS):
            del batch
            if act == "raise":
                raise OSError("no room")
            stopping.close()
            return

    coming, stopped = [world.receive(receiver) for receiver in going], world.pool.submit(stop)
    result = trainer.publish_stream(lent(weights(3)), timeout=SECONDS)
    assert all(same(future.result(SECONDS), weights(3)) for future in coming)
    assert {one.name: one.error is None for one in result.replicas} == {"stopping": False, "r1": True, "r2": True}
    if act == "raise":  # it takes the next publication
        with pytest.raises(OSError, match="no room"):
            stopped.result(SECONDS)
        going.append(stopping)
    assert_arrives(world, trainer, going, weights(4))


@pytest.mark.parametrize("make", WIRES)
def test_a_receiver_that_hangs_holds_the_others_up_for_half_of_the_time_at_most(world: World, make: Made) -> None:
    trainer = world.trainer(transports=[make()])
    hanging, *going = (world.receiver(name, transports=[make()]) for name in ("hanging", "r1", "r2"))
    trainer.wait_for_replicas(3, SECONDS)
    free = threading.Event()

    def hang() -> None:
        for _ in hanging.receive(SECONDS):
            free.wait(SECONDS)

    coming, hung = [world.receive(receiver) for receiver in going], world.pool.submit(hang)
    started = time.monotonic()
    result = trainer.publish_stream(lent(weights(3)), timeout=6.0)
    assert time.monotonic() - started < 6.0
    free.set()
    assert all(same(future.result(SECONDS), weights(3)) for future in coming)
    assert {one.name: one.error is None for one in result.replicas} == {"hanging": False, "r1": True, "r2": True}
    with pytest.raises(RoundFailed):
        hung.result(SECONDS)


@pytest.mark.parametrize("make", WIRES)
def test_a_generator_that_raises_ends_on_both_sides_and_the_next_one_arrives(world: World, make: Made) -> None:
    trainer = world.trainer(transports=[make()])
    receivers = [world.receiver(name, transports=[make()]) for name in ("r0", "r1")]
    trainer.wait_for_replicas(2, SECONDS)
    coming = [world.receive(receiver) for receiver in receivers]
    with pytest.raises(OSError, match="no gather"):
        trainer.publish_stream(failing(weights(0), 20), timeout=SECONDS)
    for future in coming:
        with pytest.raises(RoundFailed, match="no gather"):
            future.result(SECONDS)
    assert_arrives(world, trainer, receivers, weights(1))


@pytest.mark.parametrize("make", WIRES)
def test_a_trainer_rank_that_dies_in_the_middle_ends_both_sides_soon(world: World, make: Made) -> None:
    trainers = [world.trainer(rank=rank, world_size=2, transports=[make()]) for rank in range(2)]
    receivers = [world.receiver(name, transports=[make()]) for name in ("r0", "r1")]
    trainers[0].wait_for_replicas(2, SECONDS)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(lent(weights(0))):
            if index == 15:
                trainers[1].close()
            yield item

    coming = [world.receive(receiver) for receiver in receivers]
    started = time.monotonic()
    asked = [world.pool.submit(trainers[0].publish_stream, lent(weights(0)), timeout=SECONDS)]
    asked.append(world.pool.submit(trainers[1].publish_stream, tensors(), timeout=SECONDS))
    for future in asked:
        with pytest.raises(WeightSyncError):
            future.result(SECONDS)
    for received in coming:
        with pytest.raises(RoundFailed):
            received.result(SECONDS)
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize("make", WIRES)
def test_bytes_that_change_on_the_way_are_not_accepted(world: World, make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is filled again while it is sent, say."""
    trainer, receiver = world.trainer(transports=[make()]), world.receiver(transports=[make()])
    send = sender.BroadcastPublisher._send
    sent: list[int] = []

    def spoiling(publisher: Any, transfer: Any, members: Any) -> None:
        sent.append(1)
        if len(sent) == 4:
            publisher._region.payload[:] = 7
        send(publisher, transfer, members)

    monkeypatch.setattr(sender.BroadcastPublisher, "_send", spoiling)
    coming = world.receive(receiver)
    with pytest.raises(RoundFailed, match="other bytes than were published"):
        trainer.publish_stream(lent(weights(0)), timeout=SECONDS)
    with pytest.raises(RoundFailed, match="other bytes"):
        coming.result(SECONDS)


def test_a_receiver_that_is_killed_fails_alone(server: BackgroundServer, tmp_path: Path) -> None:
    test_streams.run_ranks(server, tmp_path, "SIGKILL", "60", "collective")


@pytest.mark.rare
def test_a_receiver_that_is_stopped_fails_alone(server: BackgroundServer, tmp_path: Path) -> None:
    test_streams.run_ranks(server, tmp_path, "SIGSTOP", "12", "collective")
