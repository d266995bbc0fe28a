"""A trainer rank that streams what it gathers of an FSDP2 model, with deltas. The iterator of one rank fails once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightsync

FAILING, LATE, LAST = 3, 4, 5


def model(number: int) -> nn.Sequential:
    """As version ``number`` has it: each one changes a few words, of a matrix with fewer rows than ranks among others."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 301), nn.LayerNorm(301), nn.Linear(301, 1)).requires_grad_(False)
    for parameter in module.parameters():
        parameter.view(-1)[:number] += 1.0
    return module


def gathered(module: nn.Module, *, fails: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, value) in enumerate(module.state_dict().items()):
        assert isinstance(value, DTensor)
        whole = value.full_tensor()
        if fails and index == 5:  # the last: no rank waits in a later gather
            raise OSError("no gather")
        yield name, whole


def main(rank: int, store: str, coordinator: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    outcomes: list[object] = []
    with weightsync.Trainer(weightsync.Stream(), coordinator, deltas=True) as trainer:
        trainer.wait_for_replicas(1, timeout=60)
        for number in range(1, LAST + 1):
            module = model(number)
            fully_shard(module, mesh=mesh)
            tensors = gathered(module, fails=number == FAILING and rank == 1)
            try:
                result = trainer.publish_stream(tensors, timeout=1e-4 if number == LATE else 30)
                (replica,) = result.replicas
                outcomes.append([result.version.number, replica.base, replica.nbytes])
            except (OSError, weightsync.WeightSyncError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        print(json.dumps(outcomes), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
