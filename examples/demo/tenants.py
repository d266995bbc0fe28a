"""The tenants' LoRA adapters: random matrices in PEFT's format, new ones with each version of the base weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from examples.demo.oracle import ALPHA, RANK, adapter_path
from weightsync.model import RoundResult
from weightsync.model.lora import adapter_label
from weightsync.trainer.adapters import Adapters
from weightsync.trainer.trainer import Trainer

__all__ = ["Tenants", "adapter_tensors", "draw", "tenant"]

_TARGETS = ("self_attn.v_proj", "mlp.down_proj")
_MOST_VERSIONS = 1001


def tenant(index: int) -> str:
    """Name of an adapter."""
    return f"tenant-{index}/style"


def adapter_tensors(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Matrices A and B, all zero, for linear layers in every block of ``model``, by PEFT's names.

    On a CPU the last bits of a product in float32 depend on the alignment of its matrices, and so could a token. In bfloat16 they
    do not.
    """
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(_TARGETS):
            tensors[f"{name}.lora_A.weight"] = torch.zeros(RANK, layer.in_features, dtype=dtype)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(layer.out_features, RANK, dtype=dtype)
    return tensors


def draw(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Overwrite all matrices with noise, as large as changes what the model says."""
    noise = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        scale = tensor.shape[1] ** -0.5 if ".lora_A." in name else 0.2
        tensor.copy_(scale * torch.randn(tensor.shape, generator=noise))


class Tenants:
    """One trainer rank's part in ``count`` adapters. Every rank calls it alike, and holds the whole matrices.

    Replicas go on serving ``keep`` versions of each.
    """

    def __init__(self, trainer: Trainer, model: PreTrainedModel, count: int, keep: int, seed: int, directory: Path) -> None:
        self._keep, self._seed, self._directory, self._first = keep, seed, directory, trainer.rank == 0
        self._tensors = [adapter_tensors(model) for _ in range(count)]
        self._stack = ExitStack()
        self._adapters = [self._stack.enter_context(Adapters(tensors, trainer, alpha=ALPHA)) for tensors in self._tensors]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, number: int, timeout: float) -> Iterator[tuple[RoundResult, float]]:
        """Publish version ``number`` of each adapter, one after the other, with a checkpoint for the oracle; retire older ones.

        Yields the result and the seconds of each. Raises as :meth:`weightsync.Adapters.publish`.
        """
        for index, (adapters, tensors) in enumerate(zip(self._adapters, self._tensors, strict=True)):
            name = tenant(index)
            draw(tensors, (self._seed * len(self._tensors) + index) * _MOST_VERSIONS + number)
            if self._first:
                save_file(tensors, adapter_path(self._directory, adapter_label(name, number)))
            started = time.perf_counter()
            result = adapters.publish(name, number, timeout=timeout)
            seconds = time.perf_counter() - started
            if self._first:
                adapters.retire(name, keep=self._keep)
            yield result, seconds
