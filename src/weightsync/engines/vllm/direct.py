"""Settings of vLLM that exclude direct delivery into its parameters."""

from __future__ import annotations

from typing import Protocol

import torch

from weightsync.engines.vllm.protocols import ModelConfig

__all__ = ["VllmConfig", "why_streamed"]


class VllmConfig(Protocol):
    """The part of ``vllm.config.VllmConfig`` that matters for direct delivery."""

    @property
    def model_config(self) -> ModelConfig:
        """Model settings, with the quantization method."""
        ...

    @property
    def lora_config(self) -> object | None:
        """LoRA settings; ``None`` if LoRA is disabled."""
        ...


def why_streamed(config: VllmConfig, device: torch.device) -> str | None:
    """Return the reason on one line why direct delivery is impossible; ``None`` if no setting excludes it."""
    if device.type != "cuda":
        return f"this worker's weights are on {device.type}, where vLLM repacks linear weights after loading them"
    if config.model_config.quantization is not None:
        return f"the model is quantized ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "LoRA is enabled, so vLLM must be notified of new base weights"
    return None
