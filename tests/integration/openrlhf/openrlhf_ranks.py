"""A program: OpenRLHF's own policy trainer on this CPU with DeepSpeed, updated through weightsync.

``python openrlhf_ranks.py MODEL ENGINES STAGE UPDATES [LORA_RANK [HELD_RANK PORT]]``, once for each rank. Before each update the
weights change, and rank 0 writes down the whole model. At the end every rank writes down its result. HELD_RANK stops in the last
update until whoever listens at PORT lets it go on. Stand-ins: flash-attn, which has no build for CPUs, and
``torch.cuda.synchronize`` and ``current_device``. OpenRLHF's strategy wants CUDA, so DeepSpeed is set up here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.integration.openrlhf import flash_attn_standin

from weightsync import Stream


def arguments(engines: int, stage: int, lora_rank: int) -> Namespace:
    """Those of OpenRLHF's arguments that its trainer looks at."""
    return Namespace(
        train=Namespace(max_epochs=1, colocate_all=False, async_enable=False, dynamic_batch_enable=False),
        actor=Namespace(
            eps_clip_low_high=[0.2, 0.2], dual_clip=None, loss_agg_mode="token-mean", policy_loss_type="ppo", aux_loss_coef=0.0
        ),
        algo=Namespace(
            advantage=Namespace(
                is_correction_level="off", is_correction_mode="mask", is_correction_gating="ratio",
                is_correction_threshold=[0.5, 5.0],
            )
        ),
        ds=Namespace(
            packing_samples=False, zero_stage=stage, tensor_parallel_size=1, lora=Namespace(rank=lora_rank), load_in_4bit=False
        ),
        vllm=Namespace(num_engines=engines, sync_backend="nccl", enable_prefix_caching=True),
    )  # fmt: skip


def wait_for_the_test(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.recv(1)


def main(model: str, engines: str, stage: str, updates: str, lora_rank: str = "0", held_rank: str = "-1", port: str = "0") -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    flash_attn_standin.install()
    import deepspeed
    from openrlhf.models import Actor

    from weightsync.integrations.openrlhf.policy import PublishingActorTrainer

    class ActorTrainer(PublishingActorTrainer):
        """Publishes a tiny model in many windows, and stops where the test wants it to."""

        stream = Stream(window_bytes=8192)
        held = False

        def broadcast_to_vllm(self) -> None:
            if self.held and not self._gathers:
                wait_for_the_test(int(port))
            super().broadcast_to_vllm()

        def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
            for place, item in enumerate(super()._whole()):
                if self.held and place == 12:  # windows before it have been sent
                    wait_for_the_test(int(port))
                yield item

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    deepspeed.init_distributed(dist_backend="gloo")
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        # By its source DeepSpeed waits for the last of several gathers only. With gloo an earlier one may still be writing to a
        # parameter that is being loaded: garbage was seen in one. One after the other they are all awaited.
        "zero_optimization": {"stage": int(stage), "stage3_allgather_sequential": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }  # fmt: skip
    actor: Any = Actor(model, attn_implementation="eager", param_dtype="bf16", ds_config=settings)
    actor.model, *_ = deepspeed.initialize(model=actor.model, model_parameters=actor.model.parameters(), config=settings)
    args = arguments(int(engines), int(stage), int(lora_rank))
    trainer: Any = ActorTrainer(
        Namespace(args=args), actor, None, None, None, vllm_engines=[object()] * int(engines)
    )  # the engines are not called
    gathered = int(stage) == 3
    outcome: dict[str, Any] = {}
    for number in range(int(updates)):
        whole = {}
        for name, parameter in actor.model.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=gathered), torch.no_grad():
                if not gathered or dist.get_rank() == 0:
                    parameter.add_(0.25 * (number + 1))
                    whole[name] = parameter.data.clone()
        if dist.get_rank() == 0:
            save_file(whole, f"{model}/published.safetensors")
        trainer.held = number == int(updates) - 1 and dist.get_rank() == int(held_rank)
        began = time.monotonic()
        try:
            trainer.broadcast_to_vllm()
        except Exception as error:  # noqa: BLE001 - what it is, is what the test asks
            outcome = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
            break
        outcome["replicas"] = [(replica.name, replica.version, replica.verified) for replica in trainer.result.replicas]
    Path(model, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    if "error" in outcome:
        os._exit(0)  # as Ray ends an actor: another rank may have died
    dist.barrier()
    trainer._publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
