"""What NeMo-RL's workers can do by themselves: policy workers publish their shards, and vLLM's workers read them.

NeMo-RL gives a transport a generator of whole tensors on one side, and loads what arrives on the other. The worker itself is found
where it makes our object (:func:`calling_worker`), so nothing of NeMo-RL is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from weightsync import __version__
from weightsync.engines.hf_checkpoint import checkpoint_of
from weightsync.errors import ConfigurationError
from weightsync.integrations.engine_calls import plugin_release
from weightsync.integrations.megatron import hf_state
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import ShardSource, served_checkpoint
from weightsync.integrations.updates import calling
from weightsync.model import Manifest
from weightsync.tensors.shards import ShardedState

_VLLMS = "update_weights_from_checkpoint_engine"  # a method of NeMo-RL's extension of vLLM's workers
_POLICYS = "send_weights_via_checkpoint_engine"  # and one of its policy workers


def calling_worker() -> tuple[Any, bool]:
    """Return NeMo-RL's worker in whose method this is called, and whether it is vLLM's; ``None`` outside of one."""
    worker = calling(lambda own: hasattr(own, _VLLMS) or hasattr(own, _POLICYS))
    return worker, hasattr(worker, _VLLMS)


def policy_shards(worker: Any, options: Options) -> tuple[ShardSource, Manifest]:  # noqa: ANN401 - NeMo-RL's
    """Return what a policy worker publishes, and its manifest.

    Raises:
        WeightSyncError: Its parameters are not what vLLM takes. The message says why.
    """
    model, bridge = worker.model, getattr(worker, "megatron_bridge", None)
    _refuse_first(_why_not_published(worker))
    config = model.config if bridge is None else getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)
    state: torch.nn.Module | ShardedState = model if bridge is None else hf_state(model, config=config, bridge=bridge)
    checkpoint = checkpoint_of(worker.cfg["model_name"], None, config)
    return ShardSource.of_checkpoint(state, checkpoint.manifest, options.transports)


def _why_not_published(worker: Any) -> Mapping[str, object]:  # noqa: ANN401 - NeMo-RL's
    """Return reasons, and whether each applies."""
    generation = worker.cfg.get("generation") or {}
    vllm = generation.get("vllm_cfg") or {}
    megatron = hasattr(worker, "megatron_bridge")
    peft = (worker.cfg.get("megatron_cfg") or {}).get("peft") or {}
    adapted = getattr(worker, "lora_enabled", False) or peft.get("enabled", False)
    return {
        "KV scales travel with the weights (policy.generation.vllm_cfg.kv_cache_dtype)": _is_fp8(vllm.get("kv_cache_dtype")),
        "vLLM's weights are FP8 (policy.generation.vllm_cfg.precision)": _is_fp8(vllm.get("precision")),
        "Megatron's weights are FP8 (fp8_param)": (getattr(worker, "fp8_cfg", None) or {}).get("fp8_param", False),
        "draft weights travel with the policy's (policy.draft)": getattr(worker, "draft_model", None) is not None,
        "NeMo-RL quantizes while it sends (quant_cfg)": worker.cfg.get("quant_cfg") or generation.get("quant_cfg"),
        "NeMo-RL merges LoRA adapters while it sends": adapted,
        "NeMo-RL converts each tensor of this model (state_dict_adapter)": getattr(worker.model, "state_dict_adapter", None),
        "the model is sharded by neither FSDP2 nor Megatron": not megatron and not isinstance(worker.model, FSDPModule),
    }


def about_engine(worker: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's, with NeMo-RL's extension
    """Return what the other ranks must know of a vLLM worker that can read shards. The first call may take seconds.

    Raises:
        ConfigurationError: It cannot, or another worker of its engine cannot. The message says why.
    """
    if not hasattr(worker, "weightsync_ready"):
        raise ConfigurationError(f"vLLM has not loaded the plugin of weightsync {plugin_release()}")
    config, model = worker.vllm_config, worker.model_config
    _refuse_first(
        {
            "KV scales travel with the weights (kv_cache_dtype)": _is_fp8(config.cache_config.cache_dtype),
            f"vLLM's weights are quantized ({model.quantization})": model.quantization,
            "draft weights travel with the policy's (speculative_config)": config.speculative_config,
            "vLLM's data parallelism is untested": worker.parallel_config.data_parallel_size > 1,
        }
    )
    if not worker.weightsync_ready(release=__version__):
        raise ConfigurationError("another worker of this vLLM cannot read shards")
    checkpoint = served_checkpoint(model.model, model.revision, model.hf_config, model.dtype)
    return {"replica": True, "checkpoint": checkpoint.fingerprint}


def _is_fp8(dtype: object) -> bool:
    return "fp8" in str(dtype).lower()


def _refuse_first(reasons: Mapping[str, object]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(reason)
