"""What goes wrong in an update whose calls a framework makes: streams and shards, with errors on both sides and a next update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from tests.integration.server.service_support import free_port

from weightsync.config import ServerSettings
from weightsync.errors import DeadlineExceeded, RoundFailed, WeightSyncError
from weightsync.integrations import stream_ranks
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import Meeting, ShardSource, StreamSender, join
from weightsync.integrations.updates import GRACE
from weightsync.model import RoundResult
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import manifest_of
from weightsync.trainer.stream import Stream

SECONDS = 2.0
"""Time limit of an update."""
LATEST = SECONDS + GRACE + 2.0
TRAINERS = 2
NAMES = ("rollout-0", "rollout-1")
SHAPES = {f"layers.{number}.weight": (96, 40) for number in range(9)}
OPTIONS = Options(transports=("shared_memory", "tcp"))


class Updates:
    """Two trainer ranks in this process, and two rollout ranks that join for each update, as those of verl do."""

    def __init__(self, url: str, owned: ExitStack, shards: bool) -> None:
        self.meeting = Meeting(url, SECONDS, NAMES)
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.source = ShardSource(self.weights, None, OPTIONS.transports) if shards else None
        self.manifest = manifest_of(self.weights) if shards else None
        self.senders = [StreamSender(OPTIONS, 1 << 15, "trainer", owned) for _ in range(TRAINERS)]
        self.pool = owned.enter_context(ThreadPoolExecutor(TRAINERS + len(NAMES)))

    def join(self) -> None:
        for rank, sender in enumerate(self.senders):
            sender.join(self.meeting.coordinator, rank, TRAINERS, self.source)

    def leave(self) -> None:
        for sender in self.senders:
            sender.leave()

    def update(
        self, step: int, *, trainers: Sequence[int] = (0, 1), stops: Sequence[str] = ()
    ) -> tuple[list[Future[RoundResult]], list[Future[dict[str, torch.Tensor]]]]:
        """One update, in which only ``trainers`` take part and rollout ranks in ``stops`` die after their first batch."""
        for tensor in self.weights.values():
            tensor.normal_(generator=torch.Generator().manual_seed(step))

        def send(sender: StreamSender) -> Callable[[], RoundResult]:
            whole = None if self.source is not None else iter(self.weights.items())
            return lambda: asyncio.run(sender.send(whole, self.meeting, step))

        def receive(name: str) -> Callable[[], dict[str, torch.Tensor]]:
            def receiving() -> dict[str, torch.Tensor]:
                with join(name, self.meeting, OPTIONS, None, self.manifest) as receiver:
                    taken: dict[str, torch.Tensor] = {}
                    for batch in receiver.receive(SECONDS + GRACE):
                        taken |= {name: tensor.clone() for name, tensor in batch}
                        if name in stops:
                            return taken
                    wait(sent, LATEST)  # frameworks let a rank leave when all others are done
                    return taken

            return receiving

        sent = [self.pool.submit(send(self.senders[rank])) for rank in trainers]
        return sent, [self.pool.submit(receive(name)) for name in NAMES]

    def works(self, step: int) -> None:
        self.join()
        sent, received = self.update(step)
        assert [future.result(LATEST).step for future in sent] == [step] * TRAINERS
        for future in received:
            taken = future.result(LATEST)
            assert taken.keys() == self.weights.keys()
            assert all(torch.equal(taken[name], tensor) for name, tensor in self.weights.items())


@pytest.fixture(params=[False, True], ids=["stream", "shards"])
def shards(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def updates(shards: bool, owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Updates:
    server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", str(server.token))
    return Updates(server.url, owned, shards)


@pytest.mark.parametrize(("device", "most"), [("cpu", 64 << 20), ("cuda", 256 << 20)])
def test_windows_in_host_memory_are_small_whatever_bucket_the_framework_has(
    device: str, most: int, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has one trainer rank for each of its GPUs, and each keeps three windows."""
    made: list[Stream] = []

    def trainer(stream: Stream, *_: object, **__: object) -> SimpleNamespace:
        made.append(stream)
        return SimpleNamespace(close=list)

    monkeypatch.setattr(stream_ranks, "Trainer", trainer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for bucket in (1 << 20, 2 << 30):
        StreamSender(Options.of({"device": device}, "engine"), bucket, "trainer", owned).join("http://127.0.0.1:1", 0, 1)
    assert [stream.capacity for stream in made] == [1 << 20, most]


def test_a_rollout_rank_that_dies_in_the_middle_is_named_on_all_trainer_ranks_and_fails_alone(updates: Updates) -> None:
    updates.works(1)
    updates.join()
    sent, received = updates.update(2, stops=["rollout-1"])
    for future in sent:
        with pytest.raises(RoundFailed, match=r"reached \d of \d rollout ranks \(rollout-1"):
            future.result(LATEST)
    assert all(torch.equal(tensor, updates.weights[name]) for name, tensor in received[0].result(LATEST).items())
    updates.works(3)


@pytest.mark.rare
def test_a_trainer_rank_that_does_not_take_part_ends_the_others_at_the_deadline(updates: Updates) -> None:
    updates.works(1)
    updates.join()
    began = time.monotonic()
    sent, received = updates.update(2, trainers=[0])
    with pytest.raises(DeadlineExceeded):
        sent[0].result(LATEST)
    assert time.monotonic() - began < SECONDS + 1.0
    for future in received:
        with pytest.raises((DeadlineExceeded, RoundFailed)):
            future.result(LATEST)
    assert time.monotonic() - began < LATEST
    updates.works(3)


def test_a_coordinator_that_dies_between_joining_and_sending_is_an_error_on_both_sides_and_its_successor_is_used(
    shards: bool, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "of-both-coordinators-0123456789")
    settings = ServerSettings.load(port=free_port())
    first = owned.enter_context(BackgroundServer(settings))
    updates = Updates(first.url, owned, shards)
    updates.works(1)
    updates.join()
    first.stop()
    sent, received = updates.update(2)
    errors = [*(future.exception(LATEST) for future in sent), *(future.exception(LATEST) for future in received)]
    assert all(isinstance(error, WeightSyncError) for error in errors), errors
    owned.enter_context(BackgroundServer(settings))
    updates.leave()
    updates.works(3)
