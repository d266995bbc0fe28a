"""OpenRLHF's vLLM engines as replicas. Imports no DeepSpeed, as OpenRLHF does not in these processes."""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from vllm.config import WeightTransferConfig

from weightsync.integrations.openrlhf import actor_class

_RolloutActor: Any = actor_class(RolloutRayActor)


class JoiningRolloutActor(_RolloutActor):  # type: ignore[misc]
    """OpenRLHF's rollout actor whose vLLM takes weightsync's backend, and joins the coordinator of its environment by itself."""

    async def __init__(self, *args: object, **kwargs: object) -> None:  # type: ignore[misc]  # as OpenRLHF does
        await super().__init__(*args, weight_transfer_config=WeightTransferConfig(backend="weightsync"), **kwargs)
