"""Streams over ``nccl``: engines in processes of their own, each on a GPU of its own, take each window from one broadcast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.contract.transports.broadcast_groups import groups
from tests.gpu.engine_process import Model, fingerprint
from tests.gpu.processes import Joined, change, fingerprint_of, on_two_gpus

from weightsync.config import ServerSettings
from weightsync.engine.receiver import Receiver
from weightsync.errors import RoundFailed
from weightsync.model import RoundResult
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

__all__ = ["groups"]

pytestmark = on_two_gpus
pytest.importorskip("triton", reason="needs Triton")

needs_three = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")


@pytest.fixture
def joined() -> Iterator[Joined]:
    with BackgroundServer(ServerSettings.load({}, port=0, require="any")) as server, ExitStack() as owned:
        yield Joined(server, owned)


def streaming(joined: Joined, device: str | None = "cuda:0") -> Trainer:
    trainer: Trainer = joined.trainer(Stream(window_bytes=1 << 18, device=device), transports=["nccl"])  # type: ignore[arg-type]
    return trainer


def lent(module: torch.nn.Module, at: int = -1, act: Callable[[], None] = lambda: None) -> Iterator[tuple[str, torch.Tensor]]:
    """A generator like a framework's, which calls ``act`` before tensor number ``at``."""
    for number, (name, tensor) in enumerate(module.state_dict().items()):
        if number == at:
            act()
        memory = tensor.clone()
        yield name, memory
        memory.fill_(7)


def good(result: RoundResult) -> set[str]:
    return {replica.name for replica in result.replicas if replica.error is None}


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_windows_reach_an_engine_through_one_group(joined: Joined, groups: list[int], device: str | None) -> None:
    source = Model().to("cuda:0")
    trainer = streaming(joined, device)
    engine = joined.process("far", delivery="streamed", transport="nccl")
    for number in (1, 2, 3):
        change(source, number)
        result = trainer.publish_stream(lent(source), number, timeout=60)
        (replica,) = result.replicas
        assert (replica.error, replica.transports) == (None, ("nccl",))
        assert fingerprint_of(engine) == fingerprint(source)
    assert groups == [1]


@needs_three
def test_engines_share_windows_and_one_that_is_killed_fails_alone(joined: Joined, groups: list[int]) -> None:
    source = Model().to("cuda:0")
    trainer = streaming(joined)
    engines = [joined.process(f"r{index}", delivery="streamed", transport="nccl", device=f"cuda:{index}") for index in (1, 2)]
    trainer.wait_for_replicas(2, 60)
    for number in (1, 2):
        change(source, number)
        assert good(trainer.publish_stream(lent(source), number, timeout=60)) == {"r1", "r2"}
        assert {fingerprint_of(engine) for engine in engines} == {fingerprint(source)}
    assert groups == [2]
    change(source, 3)
    middle = len(source.state_dict()) // 2
    result = trainer.publish_stream(lent(source, middle, engines[0].kill), 3, timeout=60)
    assert good(result) == {"r2"}
    assert fingerprint_of(engines[1]) == fingerprint(source)
    change(source, 4)
    assert "r2" in good(trainer.publish_stream(lent(source), 4, timeout=60))
    assert fingerprint_of(engines[1]) == fingerprint(source)


@needs_three
def test_an_engine_that_is_stopped_holds_the_others_up_for_a_part_of_the_time(joined: Joined) -> None:
    source = Model().to("cuda:0")
    trainer = streaming(joined)
    engines = [joined.process(f"r{index}", delivery="streamed", transport="nccl", device=f"cuda:{index}") for index in (1, 2)]
    trainer.wait_for_replicas(2, 60)
    change(source, 1)
    assert good(trainer.publish_stream(lent(source), 1, timeout=60)) == {"r1", "r2"}
    change(source, 2)
    middle = len(source.state_dict()) // 2
    started = time.monotonic()
    try:
        result = trainer.publish_stream(lent(source, middle, lambda: os.kill(engines[0].pid, signal.SIGSTOP)), 2, timeout=24)
        assert time.monotonic() - started < 24
        assert good(result) == {"r2"}
        assert fingerprint_of(engines[1]) == fingerprint(source)
    finally:
        os.kill(engines[0].pid, signal.SIGCONT)


def test_an_iterator_that_raises_leaves_the_group_for_the_next_one(joined: Joined) -> None:
    source = Model().to("cuda:0")
    trainer = streaming(joined)
    engine = joined.process("far", delivery="streamed", transport="nccl")
    trainer.wait_for_replicas(1, 60)

    def fail() -> None:
        raise OSError("no gather")

    with pytest.raises(OSError, match="no gather"):
        trainer.publish_stream(lent(source, len(source.state_dict()) // 2, fail), 1, timeout=60)
    change(source, 2)
    assert good(trainer.publish_stream(lent(source), 1, timeout=60)) == {"far"}
    assert fingerprint_of(engine) == fingerprint(source)


def test_a_receiver_on_the_trainers_gpu_is_told_to_use_cuda_ipc(joined: Joined) -> None:
    trainer = streaming(joined)
    server = joined.server
    with (
        Receiver("near", server.url, token=server.token, device="cuda:0", transports=["nccl"]),
        pytest.raises(RoundFailed, match="cuda_ipc"),
    ):
        trainer.publish_stream(lent(Model().to("cuda:0")), timeout=60)
