"""Streams through windows in GPU memory: tensors of a GPU to receivers and engines on GPUs, by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engine.receiver import Receiver
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")

Tensors = dict[str, torch.Tensor]

SECONDS = 60.0
DEVICES = [torch.device("cuda", index) for index in range(min(max(torch.cuda.device_count(), 1), 2))]


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0, require="any")) as running:
        yield running


def weights(seed: int, device: torch.device) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    tensors: Tensors = {"embed": torch.randn(3000, 257, generator=generator, device=device).bfloat16()}
    for layer in range(20):
        tensors[f"layers.{layer}.up"] = torch.randn(192, 311, generator=generator, device=device).bfloat16()
        tensors[f"layers.{layer}.norm"] = torch.randn(311, generator=generator, device=device)
    tensors["scale"] = torch.tensor(0.5, device=device)
    tensors["nothing"] = torch.zeros(0, 7, device=device)
    return tensors


def lent(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        memory = tensor.clone()
        yield name, memory
        memory.fill_(7)


def received(receiver: Receiver) -> Tensors:
    return {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}


def assert_arrives(server: BackgroundServer, device: torch.device, transport: str, **options: Any) -> None:
    """Publish three times from the first GPU to a receiver on ``device``, with ``options`` of both."""
    with ExitStack() as owned:
        stream = Stream(window_bytes=1 << 18, device=DEVICES[0])
        trainer = owned.enter_context(Trainer(stream, server.url, token=server.token, rank=0, world_size=1, **options))
        receiver = owned.enter_context(Receiver("r", server.url, token=server.token, device=device, **options))
        pool = owned.enter_context(ThreadPoolExecutor(1))
        for seed in range(3):
            sent = weights(seed, DEVICES[0])
            coming = pool.submit(received, receiver)
            result = trainer.publish_stream(lent(sent), timeout=SECONDS)
            arrived = coming.result(SECONDS)
            assert result.replicas[0].transports == (transport,)
            assert {tensor.device for tensor in arrived.values()} == {device}
            assert arrived.keys() == sent.keys()
            assert all(torch.equal(arrived[name].to(DEVICES[0]), sent[name]) for name in sent)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_batches_lie_on_the_receivers_device(server: BackgroundServer, device: torch.device) -> None:
    assert_arrives(server, device, "cuda_ipc")


def test_tensors_may_be_yielded_on_cuda_streams_of_their_own(server: BackgroundServer) -> None:
    """The last tensor of a window comes on an idle stream, while those before it are still being copied on busy ones."""
    sent = weights(1, DEVICES[0])
    side = [torch.cuda.Stream(DEVICES[0]) for _ in range(2)]  # type: ignore[no-untyped-call]

    def scattered() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(sent.items()):
            with torch.cuda.stream(side[number % 2]):
                if not number % 2:
                    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                yield name, tensor.clone()

    with ExitStack() as owned:
        stream = Stream(window_bytes=1 << 18, device=DEVICES[0])
        trainer = owned.enter_context(Trainer(stream, server.url, token=server.token, rank=0, world_size=1))
        receiver = owned.enter_context(Receiver("r", server.url, token=server.token, device=DEVICES[0]))
        pool = owned.enter_context(ThreadPoolExecutor(1))
        for _ in range(2):  # planned, and as planned before
            coming = pool.submit(received, receiver)
            trainer.publish_stream(scattered(), timeout=SECONDS)
            arrived = coming.result(SECONDS)
            assert all(torch.equal(arrived[name], sent[name]) for name in sent)


@pytest.mark.skipif(len(DEVICES) < 2, reason="NCCL broadcasts to other GPUs than the trainer's")
def test_windows_are_broadcast_to_another_gpu_by_nccl(server: BackgroundServer) -> None:
    assert_arrives(server, DEVICES[1], "nccl", transports=["nccl"])


def test_host_windows_take_tensors_of_a_gpu(server: BackgroundServer) -> None:
    with ExitStack() as owned:
        trainer = owned.enter_context(Trainer(Stream(window_bytes=1 << 18), server.url, token=server.token, rank=0, world_size=1))
        receiver = owned.enter_context(Receiver("r", server.url, token=server.token))
        pool = owned.enter_context(ThreadPoolExecutor(1))
        sent = weights(0, DEVICES[0])
        coming = pool.submit(received, receiver)
        trainer.publish_stream(lent(sent), timeout=SECONDS)
        arrived = coming.result(SECONDS)
        assert all(torch.equal(arrived[name], sent[name].cpu()) for name in sent)


def test_parameters_of_a_module_on_a_gpu_are_verified_where_they_are(server: BackgroundServer) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(300, 700)).to(DEVICES[-1]).requires_grad_(False)
    with ExitStack() as owned:
        stream = Stream(window_bytes=1 << 18, device=DEVICES[0])
        trainer = owned.enter_context(Trainer(stream, server.url, token=server.token, rank=0, world_size=1))
        owned.enter_context(Engine(ModuleAdapter(net), "engine", server.url, token=server.token))
        sent = {name: torch.randn_like(value, device=DEVICES[0]) for name, value in net.state_dict().items()}
        result = trainer.publish_stream(lent(sent), timeout=SECONDS)
        assert [replica.verified for replica in result.replicas] == ["installed"]
        assert all(torch.equal(value.to(DEVICES[0]), sent[name]) for name, value in net.state_dict().items())


def test_a_receiver_that_stops_fails_alone(server: BackgroundServer) -> None:
    with ExitStack() as owned:
        stream = Stream(window_bytes=1 << 18, device=DEVICES[0])
        trainer = owned.enter_context(Trainer(stream, server.url, token=server.token, rank=0, world_size=1))
        stopping, going = (
            owned.enter_context(Receiver(name, server.url, token=server.token, device=DEVICES[0])) for name in ("stopping", "going")
        )
        pool = owned.enter_context(ThreadPoolExecutor(2))

        def stop() -> None:
            for _ in stopping.receive(SECONDS):
                return

        sent = weights(1, DEVICES[0])
        coming, stopped = pool.submit(received, going), pool.submit(stop)
        result = trainer.publish_stream(lent(sent), timeout=SECONDS)
        arrived = coming.result(SECONDS)
        assert all(torch.equal(arrived[name], sent[name]) for name in sent)
        assert {replica.name: replica.error is None for replica in result.replicas} == {"stopping": False, "going": True}
        stopped.result(SECONDS)
        again = [pool.submit(received, receiver) for receiver in (stopping, going)]
        assert trainer.publish_stream(lent(sent), timeout=SECONDS).ok
        assert all(len(future.result(SECONDS)) == len(sent) for future in again)


def test_an_error_reaches_the_receiver(server: BackgroundServer) -> None:
    with ExitStack() as owned:
        stream = Stream(window_bytes=1 << 18, device=DEVICES[0])
        trainer = owned.enter_context(Trainer(stream, server.url, token=server.token, rank=0, world_size=1))
        receiver = owned.enter_context(Receiver("r", server.url, token=server.token, device=DEVICES[0]))
        coming = owned.enter_context(ThreadPoolExecutor(1)).submit(received, receiver)

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(lent(weights(0, DEVICES[0])))[:20]
            raise OSError("no gather")

        with pytest.raises(OSError, match="no gather"):
            trainer.publish_stream(failing(), timeout=SECONDS)
        with pytest.raises(RoundFailed, match="no gather"):
            coming.result(SECONDS)
