"""Pieces that the ranks of a ``WeightSource`` of vLLM 0.33 yield arrive whole, through real rounds. No vLLM is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from tests.unit.engines.weight_sources import TENSORS, Meta, NewerSource, Shard

import weightsync
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.engines.vllm.weight_source import StagedSource
from weightsync.server.server import BackgroundServer

RANKS = 3


def piece(meta: Meta, rank: int) -> torch.Tensor:
    tensor = TENSORS[meta.name]
    return tensor.chunk(2)[rank] if meta.placements else tensor


@pytest.mark.parametrize("pieces", [True, False], ids=["iter_local", "iter_full"])
def test_three_ranks_publish_what_they_own_and_one_of_them_nothing(pieces: bool) -> None:
    first, second = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(4, 3, bias=False)
    third = torch.nn.ParameterDict({"bias": torch.zeros(3)})
    served = torch.nn.ModuleDict({"first": first, "second": second, "third": third})
    owners = {"first.weight": (0, 1), "second.weight": (1,), "third.bias": None}
    metas = [
        Meta(name, tensor.dtype, tuple(tensor.shape), owners[name], (2,), (Shard(0),))
        if name == "first.weight"
        else Meta(name, tensor.dtype, tuple(tensor.shape), owners[name])
        for name, tensor in TENSORS.items()
    ]
    with ExitStack() as owned:
        coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        adapter = ModuleAdapter(served)
        owned.enter_context(weightsync.Engine(adapter, "one", coordinator.url, token=coordinator.token))
        sources = [StagedSource(NewerSource(metas, rank, piece if pieces else None), rank) for rank in range(RANKS)]
        assert not sources[2].declare()[1]
        trainers = [
            owned.enter_context(weightsync.Trainer(source, coordinator.url, token=coordinator.token, rank=rank, world_size=RANKS))
            for rank, source in enumerate(sources)
        ]
        pool = owned.enter_context(ThreadPoolExecutor(RANKS))
        for number in (1, 2):
            TENSORS["first.weight"].add_(number)
            for source in sources:
                source.stage()
            results = list(pool.map(lambda trainer: trainer.publish(number, timeout=30), trainers))  # noqa: B023 - done before it changes
            assert all(result.ok for result in results)
            for name, tensor in served.named_parameters():
                assert torch.equal(tensor, TENSORS[name]), name
