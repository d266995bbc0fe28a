"""Holds that a trainer that is closed while another of its threads publishes has let go of everything when ``close()`` returns."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

SECONDS = 20.0


@pytest.fixture
def mapped() -> Iterator[None]:
    """No region of this process's own making may be left for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weightsync")


@pytest.mark.parametrize("point", ["trainer.placing", "trainer.placed"])
def test_a_publication_that_copies_ends_before_close_returns(
    server: BackgroundServer, mapped: None, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before, reached = regions(), threading.Event()

    def slow(name: str) -> None:
        if name == point:
            reached.set()
            threading.Event().wait(0.5)

    monkeypatch.setattr(failpoints, "_gate", slow)
    with ExitStack() as owned, ThreadPoolExecutor(1) as pool:
        trainer = owned.enter_context(Trainer(torch.nn.Linear(64, 64), server.url, token=server.token))
        publishing = pool.submit(trainer.publish, 1, timeout=SECONDS)
        assert reached.wait(SECONDS)
        trainer.close()
        assert regions() == before
        with pytest.raises(WeightSyncError):
            publishing.result(SECONDS)


def test_a_stream_ends_before_close_returns(server: BackgroundServer, mapped: None) -> None:
    before, begun, closing = regions(), threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            yield f"layers.{number}.w", torch.full((64, 64), float(number))
            begun.set()
            closing.wait(SECONDS)
            threading.Event().wait(0.1)  # a gather, which other ranks take part in

    with ExitStack() as owned, ThreadPoolExecutor(1) as pool:
        trainer = owned.enter_context(Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token))
        publishing = pool.submit(trainer.publish_stream, tensors(), timeout=SECONDS)
        assert begun.wait(SECONDS)
        closing.set()
        trainer.close()
        assert regions() == before
        with pytest.raises(WeightSyncError):
            publishing.result(SECONDS)
