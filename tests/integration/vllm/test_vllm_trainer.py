"""Holds the trainer side to vLLM's own interface: a script that names another backend publishes by weightsync, either source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from weightsync import Engine
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class NoClient:
    """Replicas have joined by themselves: nothing is asked of vLLM's routes."""


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))


@pytest.mark.timeout(240)  # importing vLLM takes most of it
@pytest.mark.parametrize("plain", [True, False], ids=["ModuleSource", "another WeightSource"])
def test_vllms_factory_makes_a_trainer_that_updates_replicas(plain: bool) -> None:
    from vllm.distributed.weight_transfer import base as weights
    from vllm.distributed.weight_transfer import factory
    from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

    from weightsync.engines.vllm.plugin import register
    from weightsync.engines.vllm.trainer import WeightsyncTrainerInitInfo

    class Listed(WeightSource):  # type: ignore[misc]
        def __init__(self, source: torch.nn.Module) -> None:
            self.source = source

        def _metas(self) -> list[Any]:
            return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.source.named_parameters()]

        def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((name, one.detach().clone()) for name, one in self.source.named_parameters())

        def _placed(self) -> list[Any]:
            return [replace(meta, owners=(0,), mesh_shape=(1,), placements=(weights.Shard(0),)) for meta in self._metas()]

        metadata: Any
        if hasattr(WeightSource, "iter_local"):  # vLLM 0.33
            metadata = cached_property(_placed)
            iter_local = _walk
        else:
            metadata = _metas
            __iter__ = _walk

    register()
    register()  # vLLM may load plugins twice
    trained, served = module(1), module(2)
    coordinator = BackgroundServer(ServerSettings.load({}, port=0))
    with coordinator, Engine(ModuleAdapter(served), "one", coordinator.url, token=coordinator.token):
        info = WeightsyncTrainerInitInfo(rank=0, world_size=1, coordinator=coordinator.url, token=coordinator.token, timeout=30)
        source = ModuleSource(trained) if plain else Listed(trained)
        engine = factory.WeightTransferTrainerFactory.trainer_init(info, client=NoClient(), source=source)
        try:
            for number in (1, 2):
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter.add_(number)
                engine.send_weights()
                assert engine.result.version.number == number
                for name, parameter in served.named_parameters():
                    assert torch.equal(parameter, trained.get_parameter(name)), name
        finally:
            engine.shutdown()
            engine.shutdown()
