"""Holds the adapters here to the contract that every engine adapter has: weightsync_testing.adapter_contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from examples.demo.completions_adapter import CompletionsAdapter
from examples.demo.gate import NotSeeded
from examples.demo.generation import Generator
from tests.unit.examples.demo.models import tiny_model

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.model import Version
from weightsync.protocol.messages import Delivery
from weightsync_testing.adapter_contract import AdapterContract


class TestModule(AdapterContract):
    """A bare module that is used under its adapter's lock."""

    def engine(self) -> tuple[tuple[torch.nn.Module, ModuleAdapter], EngineAdapter]:
        module = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 7, dtype=torch.bfloat16))
        adapter = ModuleAdapter(module)
        return (module, adapter), adapter

    def installed(self, engine: tuple[torch.nn.Module, ModuleAdapter]) -> Mapping[str, torch.Tensor]:
        return engine[0].state_dict()

    def generates(self, engine: tuple[torch.nn.Module, ModuleAdapter]) -> bool:
        try:
            with engine[1].in_use(timeout=0.1):
                return True
        except DeadlineExceeded:
            return False

    def go_on(self, engine: tuple[torch.nn.Module, ModuleAdapter]) -> None:
        engine[1].resume()


class TestCompletions(AdapterContract):
    """The demo's server around a real (tiny) language model."""

    deliveries: ClassVar[tuple[Delivery, ...]] = ("streamed", "direct")

    def engine(self) -> tuple[Generator, EngineAdapter]:
        generator = Generator(tiny_model(3))
        return generator, CompletionsAdapter(generator)

    def installed(self, engine: Generator) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, torch.Tensor] = engine.model.state_dict()
        return state

    def generates(self, engine: Generator) -> bool:
        try:
            return bool(engine.complete([3, 1, 2], 2, Deadline(0.3)).tokens)
        except (Aborted, DeadlineExceeded, NotSeeded):
            return False

    def go_on(self, engine: Generator) -> None:
        engine.label(Version("somebody", 1, "0" * 16, "0" * 16))
        engine.resume()
