"""Trainer ranks that stream different tensors: each sends its windows, and together they would be no version at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import VerificationError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

SECONDS = 30.0


def test_ranks_whose_tensors_have_drifted_apart_publish_no_mixture() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        where, token = server.url, server.token
        sizes = (4096, 8192)  # of which the smaller counts
        trainers = [
            owned.enter_context(Trainer(Stream(window_bytes=nbytes), where, token=token, rank=rank, world_size=2))
            for rank, nbytes in enumerate(sizes)
        ]
        engine = owned.enter_context(Engine(ModuleAdapter(module), "engine", where, token=token))
        pool = owned.enter_context(ThreadPoolExecutor(2))
        for values in ((1.0, 2.0), (3.0, 3.0)):
            named = [[(f"{layer}.weight", torch.full((32, 32), value)) for layer in range(4)] for value in values]
            asked = [
                pool.submit(trainer.publish_stream, iter(tensors), timeout=SECONDS)
                for trainer, tensors in zip(trainers, named, strict=True)
            ]
            if values[0] != values[1]:
                for one in asked:
                    with pytest.raises(VerificationError, match=r"trainer/0 and trainer/1 stream different values of 0\.weight"):
                        one.result(SECONDS)
                assert engine.serving is None
            else:
                assert all(one.result(SECONDS).ok for one in asked)
                assert all(bool((parameter == 3.0).all()) for parameter in module.parameters())
