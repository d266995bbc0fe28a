"""A program: OpenRLHF's own policy trainer on this CPU with DeepSpeed, updated through weightsync; prints what became of it.

``python -m torch.distributed.run openrlhf_ranks.py MODEL ENGINES STAGE UPDATES [LORA_RANK]``. Before each update the weights
change. At the end every rank writes down its result, and rank 0 the whole model. Stand-ins: flash-attn, which has no build for
CPUs, and ``torch.cuda.synchronize``. OpenRLHF's strategy wants CUDA, so DeepSpeed is set up here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.integration import flash_attn_standin

from weightsync.errors import WeightSyncError


def arguments(engines: int, stage: int, lora_rank: int) -> Namespace:
    """Those of OpenRLHF's arguments that its trainer looks at."""
    return Namespace(
        train=Namespace(max_epochs=1, colocate_all=False, async_enable=False, dynamic_batch_enable=False),
        actor=Namespace(
            eps_clip_low_high=[0.2, 0.2], dual_clip=None, loss_agg_mode="token-mean", policy_loss_type="ppo", aux_loss_coef=0.0
        ),
        algo=Namespace(
            advantage=Namespace(
                is_correction_level="off", is_correction_mode="tis", is_correction_gating=None, is_correction_threshold=[0.5, 5.0]
            )
        ),
        ds=Namespace(
            packing_samples=False, zero_stage=stage, tensor_parallel_size=1, lora=Namespace(rank=lora_rank), load_in_4bit=False
        ),
        vllm=Namespace(num_engines=engines, sync_backend="nccl", enable_prefix_caching=True),
    )  # fmt: skip


def main(model: str, engines: str, stage: str, updates: str, lora_rank: str = "0") -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    flash_attn_standin.install()
    import deepspeed
    from openrlhf.models import Actor

    from weightsync.integrations.openrlhf.policy import PublishingActorTrainer

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda device=None: None
    deepspeed.init_distributed(dist_backend="gloo")
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }  # fmt: skip
    actor: Any = Actor(model, attn_implementation="eager", param_dtype="bf16", ds_config=settings)
    actor.model, *_ = deepspeed.initialize(model=actor.model, model_parameters=actor.model.parameters(), config=settings)
    args = arguments(int(engines), int(stage), int(lora_rank))
    trainer: Any = PublishingActorTrainer(
        Namespace(args=args), actor, None, None, None, vllm_engines=[object()] * int(engines)
    )  # the engines are not called
    outcome: dict[str, Any] = {}
    try:
        for number in range(int(updates)):
            for parameter in actor.model.module.parameters():
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=int(stage) == 3), torch.no_grad():
                    if int(stage) != 3 or dist.get_rank() == 0:
                        parameter.add_(0.25 * (number + 1))
            trainer.broadcast_to_vllm()
            outcome["replicas"] = [(replica.name, replica.version, replica.verified) for replica in trainer.result.replicas]
    except WeightSyncError as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
    whole = {}
    for name, parameter in actor.model.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=int(stage) == 3):
            whole[name] = parameter.data.clone()
    if dist.get_rank() == 0:
        save_file(whole, f"{model}/published.safetensors")
    Path(model, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.barrier()
    trainer._publisher and trainer._publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
