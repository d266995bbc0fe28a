"""Streams one after the other from one trainer: what is planned is kept, and what changes is noticed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.receiver import Receiver
from weightsync.errors import ConfigurationError, VersionError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream, StreamedPublication, StreamRole
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


def nonsense(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()
    yield "sparse", torch.eye(3).to_sparse()


def broken(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()
    raise ZeroDivisionError("a gather failed")


@pytest.mark.parametrize(
    ("brought", "number", "error"),
    [(lent, 3, VersionError), (nonsense, 9, ConfigurationError), (broken, 9, ZeroDivisionError)],
    ids=["refused", "nonsense", "broken"],
)
def test_a_stream_that_failed_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch, brought: Callable[[dict[str, torch.Tensor]], Any], number: int, error: type[Exception]
) -> None:
    """Errors refer to frames, and these to the windows: a cycle would keep them mapped after the trainer was closed."""
    begun = list[weakref.ref[StreamedPublication]]()
    begin = StreamRole.begin

    def noted(role: StreamRole, call: int, number: int | None) -> StreamedPublication:
        publication = begin(role, call, number)
        begun.append(weakref.ref(publication))
        return publication

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:weightsync")

    monkeypatch.setattr(StreamRole, "begin", noted)
    gc.collect()
    before = mapped()  # other tests of this process may have left some
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ThreadPoolExecutor(1) as pool:
        trainer = Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1)
        with Receiver("r", server.url, token=server.token) as receiver:
            publishing = pool.submit(trainer.publish_stream, lent(weights(0)), 7, timeout=SECONDS)
            for _ in receiver.receive(SECONDS):
                pass
            publishing.result(SECONDS)
        gc.collect()
        gc.disable()
        try:
            with suppress(error):
                trainer.publish_stream(brought(weights(1)), number, timeout=SECONDS)
                pytest.fail("it did not fail")
            for _ in range(100):  # the thread that asked the coordinator lets go right after it has said so
                if begun[-1]() is None:
                    break
                threading.Event().wait(0.01)
            assert begun[-1]() is None
            trainer.close()
            assert mapped() == before
        finally:
            gc.enable()
            trainer.close()
