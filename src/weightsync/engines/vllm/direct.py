"""What rules direct delivery into vLLM's parameters out before anything is tried."""

from __future__ import annotations

from typing import Protocol

import torch

from weightsync.engines.vllm.engines import ModelConfig

__all__ = ["VllmConfig", "why_streamed"]


class VllmConfig(Protocol):
    """The part of ``vllm.config.VllmConfig`` that decides."""

    @property
    def model_config(self) -> ModelConfig:
        """Says whether the model is quantized."""
        ...

    @property
    def lora_config(self) -> object | None:
        """Adapters, if there may be any."""
        ...


def why_streamed(config: VllmConfig, device: torch.device) -> str | None:
    """What rules direct delivery out before anything is tried, in one line; ``None``: nothing does."""
    if device.type != "cuda":
        return f"this worker's weights are on {device.type}, where vLLM repacks linear weights after loading them"
    if config.model_config.quantization is not None:
        return f"the model is quantized ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "LoRA is enabled, and vLLM has to be told of new base weights"
    return None
