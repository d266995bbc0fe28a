"""Two ranks of an asynchronous trainer of TRL's, as far as an update decides who sends the weights. No TRL is needed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import WeightSyncError
from weightsync.integrations.trl import WeightTransfer
from weightsync.integrations.trl.transfer import _synchronize

SECONDS = 20.0


def merging(trainer: Any, began: float) -> tuple[float, float, float]:
    dist.barrier()  # TRL's first step
    trainer.merged = True
    return began, began, began


def update(rank: int, store: str, coordinator: str, own: bool) -> str:
    """Ask for one update on ``rank`` of two, and say how it went. Rank 0 has the transfer made last, if it is its ``own``."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    transfer = WeightTransfer(coordinator, token="t" * 43, server=coordinator, timeout=1)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=rank == 0, unwrap_model=lambda model: model),
        weight_transfer=None if rank else transfer if own else object(),
        _weightsync=transfer,
        model=SimpleNamespace(merge_adapter=print, modules=tuple),
        merged=False,
    )
    try:
        _synchronize(merging, trainer, 0.0)
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return "merged" if trainer.merged else "published"


def train_twice(rank: int, store: str, coordinator: str, token: str) -> list[str]:
    """Two runs of one update each on ``rank`` of two that hold the same model, and the versions that they brought."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    transfer = WeightTransfer(coordinator, token=token, timeout=SECONDS)
    torch.manual_seed(2)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=rank == 0, unwrap_model=lambda model: model),
        weight_transfer=None if rank else transfer, _weightsync=transfer, model_version=0, rollout_worker=None,
        model=torch.nn.ModuleDict({"up": torch.nn.Linear(5, 7, bias=False), "down": torch.nn.Linear(7, 3, bias=False)}),
    )  # fmt: skip
    versions = []
    try:
        for _ in range(2):
            _synchronize(merging, trainer, 0.0)
            assert transfer.result is not None
            versions.append(str(transfer.result.version).rpartition("@")[2])
            if not rank:
                transfer.destroy()
        return versions
    finally:
        transfer.destroy()
        dist.destroy_process_group()


def adapted(seed: int) -> Any:
    """A PEFT model whose adapter changes its first layer."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = torch.nn.ModuleDict({"up": torch.nn.Linear(5, 7, bias=False), "down": torch.nn.Linear(7, 3, bias=False)})
    base.forward = lambda x: base["down"](base["up"](x))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["up"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    return model


def merge_after_a_pass(rank: int, store: str, coordinator: str, token: str) -> str:
    """Publish merged shards of FSDP2 on ``rank`` of two after a pass without gradients, which leaves the parameters gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    transfer = WeightTransfer(coordinator, token=token, timeout=SECONDS, merge=True)
    fully_shard(model := adapted(2), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=rank == 0, unwrap_model=lambda model: model), rollout_worker=None,
        weight_transfer=None if rank else transfer, _weightsync=transfer, model_version=0, model=model,
    )  # fmt: skip
    try:
        for _ in range(2):
            _synchronize(merging, trainer, 0.0)
            with torch.no_grad():
                model(torch.ones(1, 5))
        _synchronize(merging, trainer, 0.0)
        return str(transfer.result and transfer.result.replicas[0].verified)
    finally:
        transfer.destroy()
        dist.destroy_process_group()
