"""A program: OpenRLHF's own rollout actor with a real vLLM on this CPU, made by its ``create_vllm_engines`` under Ray.

``python openrlhf_rollout.py MODEL``. It joins the coordinator of its environment. For every line of input it writes down what its
vLLM holds. Ray is told of a GPU that is not there, since OpenRLHF asks for one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tests.integration.openrlhf import flash_attn_standin

HELD = ("model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.qkv_proj.bias")


def held(worker: Any) -> dict[str, Any]:
    """Parameters that vLLM's CPU build keeps as they are."""
    parameters = dict(worker.model_runner.model.named_parameters())
    return {name: parameters[name].detach().clone() for name in HELD}


def main(model: str) -> None:
    flash_attn_standin.install()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import ray
    from openrlhf.trainer.ray import vllm_engine

    from weightsync.integrations.openrlhf import actor_class, enable
    from weightsync.integrations.openrlhf.rollout import JoiningRolloutActor

    class RolloutActor(JoiningRolloutActor):
        async def held(self) -> Any:
            return await self.llm.collective_rpc(held)

    enable()
    assert actor_class(vllm_engine.RolloutRayActor) is JoiningRolloutActor
    vllm_engine.RolloutRayActor = ray.remote(RolloutActor)
    with tempfile.TemporaryDirectory(prefix="o-") as folder:
        ray.init(
            num_cpus=2, num_gpus=1, include_dashboard=False, logging_level="error", object_store_memory=80 << 20, _temp_dir=folder
        )  # fmt: skip
        try:
            (engine,) = vllm_engine.create_vllm_engines(1, 1, model, 0, False, True, True, 64, gpu_memory_utilization=0.5)
            for _ in sys.stdin:
                (held_by_rank,) = ray.get(engine.held.remote(), timeout=60)
                save_file(held_by_rank, str(Path(model, "held.safetensors")))
                break
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
