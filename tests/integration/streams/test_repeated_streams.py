"""Streams one after the other from one trainer: what is planned is kept, and what changes is noticed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.receiver import Receiver
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

SECONDS = 30.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layers.{number}.w": torch.randn(24, 31, generator=generator).bfloat16() for number in range(12)}
    tensors["embed"] = torch.randn(130, 41, generator=generator)  # larger than a window
    return tensors | {f"layers.{number}.norm": torch.randn(31, generator=generator) for number in range(12)}


def lent(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        memory = tensor.clone()
        yield name, memory
        memory.detach().fill_(7)


def test_the_next_stream_may_bring_other_tensors() -> None:
    streams = [
        weights(0),
        weights(1),
        {**weights(2), "more": torch.ones(3)},
        {name: tensor for name, tensor in weights(3).items() if name != "embed"},
        {name: tensor.double() if name.endswith("5.norm") else tensor for name, tensor in weights(4).items()},
        dict(reversed(weights(5).items())),
        {name: tensor.requires_grad_() for name, tensor in reversed(weights(6).items())},
    ]
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=4096), server.url, token=server.token, rank=0, world_size=1) as trainer,
        Receiver("r0", server.url, token=server.token) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):

        def received() -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}

        for number, sent in enumerate(streams):
            coming = pool.submit(received)
            with torch.inference_mode(number % 3 == 0):  # what is planned there is written to outside of it, and the reverse
                assert trainer.publish_stream(lent(sent), timeout=SECONDS).ok
            arrived = coming.result(SECONDS)
            assert arrived.keys() == sent.keys()
            assert all(torch.equal(arrived[name], sent[name]) and arrived[name].dtype == sent[name].dtype for name in sent)


@pytest.mark.parametrize("streams", [0, 1, 2])
def test_a_closed_trainer_has_given_its_windows_back(streams: int) -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:weightsync")

    sent, before = weights(0), mapped()
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ThreadPoolExecutor(1) as pool:
        trainer = Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1)
        for _ in range(streams):
            with Receiver("r", server.url, token=server.token) as receiver:
                publishing = pool.submit(trainer.publish_stream, lent(sent), timeout=SECONDS)
                for _ in receiver.receive(SECONDS):
                    pass
                publishing.result(SECONDS)
        assert mapped() > before
        trainer.close()
        assert mapped() == before
