"""Receivers at the end of a stream."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.receiver import Receiver, _Handover
from weightsync.server.server import BackgroundServer
from weightsync.trainer.agent import Trainer
from weightsync.trainer.stream import Stream

SECONDS = 20.0


def test_a_receiver_that_is_closed_after_its_loop_has_taken_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = _Handover.resume

    def slow(handover: _Handover) -> None:
        resume(handover)  # ends the loop
        time.sleep(0.3)  # before the coordinator hears of it

    monkeypatch.setattr(_Handover, "resume", slow)
    sent = {f"layers.{number}": torch.randn(64, 33) for number in range(8)}
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Trainer(Stream(window_bytes=1 << 14), server.url, token=server.token, rank=0, world_size=1) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        receiver = Receiver("r0", server.url, token=server.token)
        publishing = pool.submit(trainer.publish_stream, iter(sent.items()), timeout=SECONDS)
        received = {name: tensor.clone() for batch in receiver.receive(SECONDS) for name, tensor in batch}
        receiver.close()
        assert [replica.error for replica in publishing.result(SECONDS).replicas] == [None]
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], sent[name]) for name in sent)
