"""Transformers' modules sharded by the Megatron-FSDP of megatron-core, on the CPU, with weights that are known everywhere."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model
from tests.integration.megatron.megatron_cases import Case, fsdp_values, hf_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

__all__ = ["change", "sharded"]

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


class Idle:
    """A CUDA stream that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def sharded(case: Case) -> dict[str, torch.Tensor]:
    """The live DTensors of this rank by checkpoint name, as the guide takes them."""
    from transformers import AutoModelForCausalLM

    torch.cuda.current_device = lambda: 0
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    torch.cuda.Stream = Idle  # type: ignore[assignment,misc]
    mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    model: Any = AutoModelForCausalLM.from_config(hf_config(case.family, case.changes), dtype=getattr(torch, case.dtype))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(fsdp_values(name, 1, tuple(value.shape)))
    if case.tp > 1:
        styles: dict[str, ParallelStyle] = {f"*.{name}": ColwiseParallel() for name in COLUMNS} | {
            f"*.{name}": RowwiseParallel() for name in ROWS
        }
        parallelize_module(model, mesh["tp"], styles)
    wrapped = fully_shard_model(
        model, mesh, dp_shard_dim="dp", tp_dim="tp", device=torch.device("cpu"), fsdp_unit_modules=[type(model.model.layers[0])]
    )
    state = {name.removeprefix("module."): value for name, value in wrapped.state_dict(keep_vars=True).items()}
    uneven = [value for value in state.values() if isinstance(value, DTensor) and len(value) % case.dp == 0]
    uneven = [value for value in uneven if len(value.to_local()) * case.dp != len(value)]
    assert uneven, "Megatron-FSDP cuts as torch does, and this test shows nothing"
    return state


@torch.no_grad()
def change(state: dict[str, torch.Tensor], version: int) -> None:
    """From what the model held when Megatron-FSDP cut it to the values of ``version``."""
    for value in {id(value): value for value in state.values()}.values():
        value.to_local().add_(float(version > 1))  # type: ignore[attr-defined]
