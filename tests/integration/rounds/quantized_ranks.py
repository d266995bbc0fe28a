"""A trainer rank whose FSDP2 shards cut blocks. It publishes quantized versions, some of which fail, and reports each outcome."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync
from weightsync import failpoints

ROWS, COLUMNS = 300, 160
FORMATS = {"0.weight": "fp8-block", "1.weight": "nvfp4", "2.q_proj.weight": "fp8-tensor", "2.k_proj.weight": "fp8-tensor"}


def model() -> nn.Sequential:
    """Matrices whose blocks two ranks cut, two that engines fuse, and a norm."""
    attention = nn.ModuleDict({name: nn.Linear(COLUMNS, 64, bias=False) for name in ("q_proj", "k_proj")})
    parts = (nn.Linear(COLUMNS, ROWS), nn.Linear(COLUMNS, ROWS, bias=False), attention, nn.LayerNorm(COLUMNS))
    return nn.Sequential(*parts).bfloat16()


def values(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    """What a parameter holds in version ``number``; its largest value is in the last row."""
    generator = torch.Generator().manual_seed(number * 1000 + len(name) + ord(name[0]))
    drawn = torch.randn(shape, generator=generator) * number
    return (drawn * torch.linspace(0.1, 3, shape[0]).view(-1, *(1 for _ in shape[1:]))).bfloat16()


def fill(module: nn.Module, number: int, rank: int) -> None:
    for name, parameter in module.named_parameters():
        whole = values(name, tuple(parameter.shape), number)
        local = parameter.to_local()  # type: ignore[attr-defined]
        first = rank * -(-parameter.shape[0] // 2)
        with torch.no_grad():
            local.copy_(whole[first : first + local.shape[0]])


def main(rank: int, store: str, coordinator: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    outcomes = []

    def publish(number: int) -> None:
        try:
            outcomes.append(str(trainer.publish(number, timeout=30).version.number))
        except weightsync.WeightSyncError as error:
            outcomes.append(f"{type(error).__name__}: {error}")

    with weightsync.Trainer(module, coordinator, quantize=FORMATS if rank else "as-served") as trainer:
        trainer.wait_for_replicas(1, timeout=60)
        for number in (1, 2):
            fill(module, number, rank)
            publish(number)
        if rank == 1:  # row 150, in the block of rows 128 to 255 that both ranks hold a part of
            with torch.no_grad():
                module[0].weight.to_local()[0, 3] = float("nan")  # type: ignore[union-attr, operator]
        publish(3)
        fill(module, 4, rank)
        if rank == 0:  # fails after all ranks have come, and before the maxima

            def fail(name: str) -> None:
                if name == "trainer.place":
                    raise weightsync.LoadError("failed on purpose")

            failpoints.install(fail)
        publish(4)
        failpoints.install(lambda name: None)
        fill(module, 5, rank)
        publish(5)
        print(json.dumps(outcomes), flush=True)
        sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
