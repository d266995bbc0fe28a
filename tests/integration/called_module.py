"""A worker of a vLLM that is not there: a model in host memory with a loader as vLLM's, and what weightsync's methods need."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weightsync.engines.traced_shards import find_direct
from weightsync.engines.vllm import in_call
from weightsync.engines.vllm.plugin import worker_method


def make_model(folder: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


class Model(torch.nn.Module):
    """A model with a loader as vLLM's have."""

    def __init__(self, path: str) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(path)
        self.inner = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.inner.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


class MethodsOfPlugin:
    """The methods that weightsync's plugin adds to vLLM's worker."""

    weightsync_ready, weightsync_join = worker_method("ready"), worker_method("join")
    weightsync_update, weightsync_leave = worker_method("update"), worker_method("leave")


def worker_of(model: Model, path: str) -> dict[str, Any]:
    """The attributes of vLLM's worker that are used."""
    parallel = SimpleNamespace(
        rank=0, world_size=1, world_size_across_dp=1, data_parallel_index=0, data_parallel_size=1, enable_eplb=False,
        distributed_executor_backend="mp",
    )  # fmt: skip
    config = SimpleNamespace(model=path, revision=None, hf_config=model.inner.config, quantization=None, dtype=torch.bfloat16)
    cache = SimpleNamespace(cache_dtype="auto")
    return {
        "device": torch.device("cpu"), "parallel_config": parallel, "model_config": config, "get_model": lambda: model,
        "vllm_config": SimpleNamespace(model_config=config, lora_config=None, cache_config=cache, speculative_config=None),
    }  # fmt: skip


def without_vllm() -> None:
    """Let weightsync's methods of vLLM's worker take a :class:`Model` in this process."""
    modules: Any = sys.modules
    modules["vllm"], modules["vllm.config"] = ModuleType("vllm"), ModuleType("vllm.config")
    modules["vllm.config"].set_current_vllm_config = lambda _: contextlib.nullcontext()
    given: Any = in_call
    given.check_interface = lambda package, purpose: None
    given.install = lambda model, config, tensors: model.load_weights(tensors)
    given.direct_shards = _shards


def _shards(config: Any, model: Any, device: torch.device, checkpoint: Any, ranks: int) -> Any:
    return find_direct(model, checkpoint.manifest, lambda tensors, layers: model.load_weights(tensors), device, ranks)
