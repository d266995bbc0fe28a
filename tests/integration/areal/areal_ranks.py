"""A program: AReaL's own FSDP2 engine on this CPU, updated through weightsync as AReaL's trainer does.

``python areal_ranks.py MODEL SERVERS VERSION...``, once for each rank. Before each version the weights change. At the
end every rank writes down its result, and rank 0 the whole model in the dtype that is published.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from areal.api import FinetuneSpec, ModelAllocation, WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig, OptimizerConfig, TrainEngineConfig
from areal.engine import FSDPEngine, RemotevLLMEngine
from safetensors.torch import save_file

from weightsync.errors import WeightSyncError
from weightsync.integrations.areal.actor import PublishesShards


class Engine(PublishesShards, FSDPEngine):  # type: ignore[misc]
    """``PublishingFSDPActor`` without AReaL's PPO, which needs dozens of packages more."""


def updated(engine: Any, rollout: Any, meta: Any, versions: list[int]) -> dict[str, Any]:
    """What AReaL's trainer does for each version; the replicas' states and versions, or the error."""
    try:
        engine.connect_engine(rollout, meta)
        for version in versions:
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.add_(version * 0.25)
            engine.update_weights(meta.with_version(version))
            engine.set_version(version)
            rollout.set_version(version)
    except WeightSyncError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {
        "replicas": [(replica.name, replica.version, replica.verified) for replica in engine.result.replicas],
        "label": str(engine.result.version),
        "rollout": rollout.get_version(),
    }


def main(model: str, servers: str, *versions: str) -> None:
    torch.set_num_threads(1)
    names = {"experiment_name": "weightsync", "trial_name": "test"}
    config = TrainEngineConfig(path=model, backend="fsdp:d2", attn_impl="sdpa", optimizer=OptimizerConfig(), **names)
    engine: Any = Engine(config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=2))
    rollout = RemotevLLMEngine(InferenceEngineConfig(backend=f"vllm:d{servers}"))  # of servers that AReaL does not call here
    outcome: dict[str, Any] = {}
    if not versions:
        outcome["disk"] = updated(engine, rollout, WeightUpdateMeta.from_disk("weightsync", "test", model), [1])
        config.use_lora = True
    meta = WeightUpdateMeta.from_fsdp_xccl(gen_allocation=ModelAllocation.from_str(f"vllm:d{servers}"))
    outcome |= updated(engine, rollout, meta, [int(version) for version in versions])
    whole = {name: tensor.full_tensor().to(torch.bfloat16) for name, tensor in engine.model.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(whole, f"{model}/published.safetensors")
    Path(model, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
