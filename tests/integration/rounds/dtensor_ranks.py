"""The ranks of the DTensor tests: shard a model in each way, and write down what weightsync says that they hold."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.unit.tensors.samples import raw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from weightsync.publishing.copied_shards import HostPublisher
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import shards_of

Case = Callable[[int], nn.Module | dict[str, torch.Tensor]]


class Block(nn.Module):
    """Extents that no world size divides, a dimension smaller than the world, a bias, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.odd = nn.Linear(8, 7)
        self.gate = nn.Linear(8, 1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        x = x + self.down(self.up(x))
        out: torch.Tensor = self.head(x) * self.gate(x) + self.odd(x).sum()
        return out


def block() -> Block:
    torch.manual_seed(5)
    return Block()


def fsdp(world: int) -> nn.Module:
    model = block()
    mesh = init_device_mesh("cpu", (world,))
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.tensor([[1, 2, 3]]))
    return model


def hsdp(world: int) -> nn.Module:
    model = block()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    return model


def tensor_parallel(world: int) -> nn.Module:
    model = block()
    return parallelize_module(model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_tensor_parallel(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def by_hand(world: int) -> dict[str, torch.Tensor]:
    """Any dimension, several on one, other dtypes, everything replicated, nothing distributed."""
    torch.manual_seed(9)
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (world // 2, 2))
    return {
        "middle": distribute_tensor(torch.randn(3, 5, 4), line, [ShardOn(1)]),
        "last": distribute_tensor(torch.randn(3, 5).bfloat16(), line, [ShardOn(-1)]),
        "both": distribute_tensor(torch.randint(0, 99, (6, 10)), grid, [ShardOn(0), ShardOn(1)]),
        "twice": distribute_tensor(torch.randn(9, 2), grid, [ShardOn(0), ShardOn(0)]),
        "copies": distribute_tensor(torch.randn(4), grid, [Replicate(), Replicate()]),
        "few": distribute_tensor(torch.randn(1, 3).half(), line, [ShardOn(0)]),
        "scalar": distribute_tensor(torch.tensor(2.5), line, [Replicate()]),
        "plain": torch.arange(6).view(2, 3) > 2,
    }


def experts(world: int) -> nn.Module:
    """All experts of a layer in one parameter, as Transformers holds them; the second layer's are cut across the experts."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"moe_intermediate_size": 6, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": []}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    mesh = init_device_mesh("cpu", (world,))
    first, second = model.model.layers
    fully_shard(first, mesh=mesh)
    fully_shard(second, mesh=mesh, shard_placement_fn=lambda parameter: ShardOn(1 if parameter.dim() == 3 else 0))
    fully_shard(model, mesh=mesh)
    return cast(nn.Module, model)


CASES: dict[str, Case] = {
    "experts": experts,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor_parallel": tensor_parallel,
    "fsdp_tensor_parallel": fsdp_tensor_parallel,
    "by_hand": by_hand,
}


def report(state: nn.Module | dict[str, torch.Tensor], folder: Path, name: str, rank: int) -> None:
    manifest, shards = shards_of(state, include_buffers=True)
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    with torch.no_grad():  # after shards_of: the shards must see it
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            if tensor.is_floating_point():
                tensor.mul_(2)
    layout = packed_layout(manifest, shards)
    region = np.zeros(max(layout.regions[0], 1), np.uint8)
    digests = HostPublisher(manifest, shards, layout, region.ctypes.data).place()
    whole = {}
    for key, tensor in tensors.items():
        whole[key] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # a collective: every rank calls it
    if isinstance(state, PreTrainedModel):
        whole = revert_weight_conversion(state, whole)
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.uint64 | np.uint8]]] = {"digests": digests}
    for row, one in enumerate(shards):
        arrays[f"starts/{row}"] = np.array(one.box.starts, np.int64)
        arrays[f"stops/{row}"] = np.array(one.box.stops, np.int64)
        first = int(layout.offset[row])
        arrays[f"bytes/{row}"] = region[first : first + one.box.size * one.tensor.element_size()]
    for spec in manifest:
        arrays[f"full/{spec.name}"] = raw(whole[spec.name])
    np.savez(folder / f"{name}-{rank}.npz", **arrays)  # type: ignore[arg-type]
    named = [manifest.tensors, [one.name for one in shards]]
    (folder / f"{name}-{rank}.msgpack").write_bytes(msgspec.msgpack.encode(named))


def run(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    for name, case in CASES.items():
        report(case(world), folder, name, rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks: torch and the compiled kernels are loaded once for all of them."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for argument in sys.argv[2:]:
        world, folder = int(argument), Path(sys.argv[1]) / argument
        folder.mkdir()
        ranks = [context.Process(target=run, args=(rank, world, folder), daemon=True) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        if any(rank.exitcode != 0 for rank in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
