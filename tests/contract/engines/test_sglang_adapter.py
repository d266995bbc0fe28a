"""Holds SGLang's adapter, around a stand-in for its scheduler, to the contract that every engine adapter has.

``tests/integration/sglang/test_sglang.py`` does the same with SGLang's own scheduler and model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from tests.contract.engines.sglang_stand_in import StandInScheduler, adapter_of

from weightsync.engine.adapter import EngineAdapter
from weightsync.protocol.messages import Delivery
from weightsync_testing.adapter_contract import AdapterContract


class TestSglang(AdapterContract):
    delivery: ClassVar[Delivery] = "streamed"
    deliveries: ClassVar[tuple[Delivery, ...]] = ("streamed",)

    @pytest.fixture(autouse=True)
    def schedulers(self) -> Iterator[None]:
        self.running: list[StandInScheduler] = []
        yield
        for scheduler in self.running:
            scheduler.close()

    def engine(self) -> tuple[Any, EngineAdapter]:
        scheduler = StandInScheduler()
        self.running.append(scheduler)
        adapter = adapter_of(scheduler, self.delivery)
        assert adapter.pauses_twice  # or a test of the contract is skipped
        return scheduler, adapter

    def installed(self, engine: Any) -> Mapping[str, torch.Tensor]:
        return {name: tensor.contiguous() for name, tensor in engine.model.by_checkpoint().items()}

    def generates(self, engine: Any) -> bool:
        before = engine.steps
        engine.input.append(1)
        time.sleep(0.05)
        return bool(engine.steps > before)

    def go_on(self, engine: Any) -> None:
        engine._engine_paused = False  # requests of other clients wait
        time.sleep(0.05)


class TestSglangDirect(TestSglang):
    delivery: ClassVar[Delivery] = "direct"
    deliveries: ClassVar[tuple[Delivery, ...]] = ("direct", "streamed")
