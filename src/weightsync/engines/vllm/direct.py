"""Direct delivery into the parameters of a vLLM model, and the settings of vLLM that exclude it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch

from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.processing import methods_kept
from weightsync.engines.traced_shards import DirectShards, find_direct
from weightsync.engines.vllm.experts import MovingExperts
from weightsync.engines.vllm.loading import format_to_load, install_some, kept_by_kernels, process_layers

VllmConfig: TypeAlias = Any
"""``vllm.config.VllmConfig``. Its ``lora_config`` is ``None`` if LoRA is disabled."""


def why_streamed(config: VllmConfig, device: torch.device) -> str | None:
    """Return the reason on one line why direct delivery is impossible; ``None`` if no setting excludes it."""
    if device.type != "cuda":
        return f"this worker's weights are on {device.type}, where vLLM repacks linear weights after loading them"
    if config.model_config.quantization not in (None, "fp8", "compressed-tensors"):
        return f"the model is quantized ({config.model_config.quantization}), which was never tried"
    if config.lora_config is not None:
        return "LoRA is enabled, so vLLM must be notified of new base weights"
    return None


def direct_shards(
    config: VllmConfig,
    model: torch.nn.Module,
    device: torch.device,
    checkpoint: HfCheckpoint,
    ranks: int,
    experts: MovingExperts | None = None,
) -> DirectShards | str:
    """Return shards over the parameters of ``model``, or the reason to stream. Runs on vLLM's model thread, between steps.

    They follow ``experts`` that move.
    """
    reason = why_streamed(config, device)
    if reason is not None:
        return reason

    def reload(tensors: Iterable[tuple[str, torch.Tensor]], layers: Collection[str]) -> None:
        install_some(model, config.model_config, tensors)

    trial = partial(find_direct, model, checkpoint.manifest, reload, device, ranks, engine="vLLM", package="vllm")
    if experts is not None:
        if config.model_config.quantization is not None:
            return f"the model is quantized ({config.model_config.quantization}), and its experts move (--enable-eplb)"
        return trial(to_load=experts.all_here, moving=experts)
    if config.model_config.quantization is None:
        return trial()
    layer = kept_by_kernels(model)
    if layer is not None:
        return f"the kernel of {layer} keeps tensors besides the parameters, which direct delivery would not update"
    # Processing replaces quantized parameters. Whether it also changes what they hold, the trial finds out.
    with methods_kept(model):
        return trial(to_load=partial(format_to_load, model), process=partial(process_layers, config, model))
