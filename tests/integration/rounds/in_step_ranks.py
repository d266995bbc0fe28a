"""Two engine ranks that compute in step, one forward pass after the other, while versions come."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync

WIDTH, LAYERS = 8, 3


def model() -> nn.Sequential:
    """Layers without biases."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def fill(module: nn.Module, number: int) -> None:
    """Make ``module`` multiply by ``number`` in each layer."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(number * torch.eye(WIDTH))


def serve(module: nn.Module, adapter: weightsync.ModuleAdapter, last: int, *, moves: bool) -> tuple[int, list[str]]:
    """Compute until version ``last``. Returns the number of passes, and what was wrong with some."""
    passes, wrong, version = 0, list[str](), None
    while version is None or version.number < last:
        with adapter.in_use() as version, torch.no_grad():
            if version is None:
                dist.barrier()
                continue
            diagonal = torch.diagonal(module(torch.eye(WIDTH)))
            passes += 1
            if not bool((diagonal == float(version.number) ** LAYERS).all()):
                wrong.append(f"{version}: {diagonal.tolist()}")
            if moves and passes % 3 == 0:
                for parameter in module.parameters():
                    parameter.data = parameter.data.clone()
    return passes, wrong


def main(rank: int, store: str, coordinator: str, kind: str, last: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    module = model()
    group = None
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for layer in list(module)[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)  # it keeps what it gathers from one pass to the next
    elif kind == "replicated":
        group = dist.group.WORLD
    adapter = weightsync.ModuleAdapter(module, process_group=group)
    with weightsync.Engine(adapter, "in-step", coordinator, rank=rank, world_size=2):
        try:
            passes, wrong = serve(module, adapter, last, moves=kind == "replicated")
            print(json.dumps({"passes": passes, "wrong": wrong, "error": ""}), flush=True)
        except weightsync.WeightSyncError as error:
            print(json.dumps({"passes": 0, "wrong": [], "error": f"{type(error).__name__}: {error}"}), flush=True)
        sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
