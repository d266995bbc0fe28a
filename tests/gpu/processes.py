"""What tests on GPUs run in separate processes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.gpu.owner_process import HERE
from tests.processes import ChildProcess

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.protocol.messages import Offer
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

__all__ = ["Joined", "OwnerProcess", "change", "far", "fingerprint_of", "on_two_gpus"]

on_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]
"""Marks of tests whose engine is on another GPU than the trainer."""


class OwnerProcess(ChildProcess):
    """The owner of published memory, whose answers are JSON."""

    def __init__(self, seed: int, *arguments: str, **environment: str) -> None:
        super().__init__("-W", "ignore", "-m", "tests.gpu.owner_process", 0, seed, *arguments, environment=environment)
        self.seed = seed
        try:
            self.hello: dict[str, Any] = json.loads(self.line())
        except BaseException:
            self.close()
            raise

    def tell(self, line: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(line))
        return answer

    @property
    def offer(self) -> Offer:
        return Offer("cuda_ipc", self.hello["address"], HERE)


def far() -> str:
    """The engine's device."""
    return f"cuda:{torch.cuda.device_count() - 1}"


def change(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator(device="cuda:0").manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cuda:0"))


class Joined:
    """Trainer and engine ranks of this process, and engine processes, at one coordinator."""

    def __init__(self, server: BackgroundServer, owned: ExitStack) -> None:
        self.server, self._owned = server, owned

    def trainer(self, state: torch.nn.Module, **options: object) -> Trainer:
        return self._owned.enter_context(Trainer(state, self.server.url, token=self.server.token, **options))  # type: ignore[arg-type]

    def engine(self, adapter: EngineAdapter, replica: str = "here", **options: object) -> Engine:
        made = Engine(adapter, replica, self.server.url, token=self.server.token, **options)  # type: ignore[arg-type]
        return self._owned.enter_context(made)

    def process(
        self, replica: str, stop: str = "", delivery: str = "auto", transport: str = "", device: str = "", *, serve: bool = False
    ) -> ChildProcess:
        """An engine in another process, joined when this returns. With ``serve`` other replicas may read from it."""
        where = (device or far())[5:]
        command = ("-W", "ignore", "-m", "tests.gpu.engine_process", replica, where, stop, delivery, transport)
        environment = {"WEIGHTSYNC_COORDINATOR": self.server.url, "WEIGHTSYNC_TOKEN": self.server.token}
        process = ChildProcess(*command, environment=environment | {"WEIGHTSYNC_SERVE_WEIGHTS": "on" if serve else "off"})
        self._owned.enter_context(process).expect("joined")
        return process


def fingerprint_of(process: ChildProcess) -> str:
    return process.ask("?")
