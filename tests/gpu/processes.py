"""What tests on GPUs run in processes of their own, and how they talk to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.gpu.owner_process import HERE

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.protocol.messages import Offer
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

__all__ = ["Joined", "OwnerProcess", "change", "end_of", "far", "fingerprint_of", "line_of", "on_two_gpus", "told"]

on_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]
"""Marks of tests whose engine is on another GPU than the trainer."""


class OwnerProcess:
    """The other process, and a way to talk to it."""

    def __init__(self, seed: int, *arguments: str, **environment: str) -> None:
        self.seed = seed
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.owner_process", "0", str(seed), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def tell(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    @property
    def offer(self) -> Offer:
        return Offer("cuda_ipc", self.hello["address"], HERE)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


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
    ) -> subprocess.Popen[str]:
        """An engine in another process, joined when this returns. With ``serve`` other replicas may read from it."""
        where = (device or far())[5:]
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.engine_process", replica, where, stop, delivery, transport]
        environment = {**os.environ, "WEIGHTSYNC_COORDINATOR": self.server.url, "WEIGHTSYNC_TOKEN": self.server.token}
        environment["WEIGHTSYNC_SERVE_WEIGHTS"] = "on" if serve else "off"
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._owned.callback(end_of, process)
        assert line_of(process) == "joined"
        return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: subprocess.Popen[str], line: str) -> str:
    """Its answer to ``line``."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return line_of(process)


def fingerprint_of(process: subprocess.Popen[str]) -> str:
    return told(process, "?")


def end_of(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
