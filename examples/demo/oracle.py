"""Checkpoints that owe nothing to weightsync: gathered by torch, saved by safetensors, named by version."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.functional import linear
from transformers import PreTrainedModel

from examples.demo.records import Order
from weightsync.errors import ConfigurationError

__all__ = ["ALPHA", "RANK", "Oracle", "adapter_path", "checkpoint_path", "save_checkpoint", "write_checkpoint"]

RANK, ALPHA = 8, 16.0
"""Of every adapter; ``alpha / rank`` scales the product of its matrices."""

_HEAD = "lm_head.weight"


def checkpoint_path(directory: Path, version: Order) -> Path:
    """Where the checkpoint of ``version`` lies."""
    epoch, number = version
    return directory / f"version-{epoch}-{number:05d}.safetensors"


def adapter_path(directory: Path, label: str) -> Path:
    """Where the matrices of an adapter's version (``tenant-0/style@3``) lie."""
    return directory / f"adapter-{label.replace('/', '_')}.safetensors"


def save_checkpoint(model: PreTrainedModel, directory: Path, version: Order, dtype: torch.dtype | None = None) -> None:
    """Gather the whole model on rank 0 with torch's checkpoint API and save it there, as ``dtype``. Every rank calls this."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.is_initialized() and dist.get_rank():
        return
    if model.config.tie_word_embeddings:
        state.pop(_HEAD, None)  # safetensors stores no tensor twice
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    write_checkpoint({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}, directory, version)


def write_checkpoint(tensors: Mapping[str, torch.Tensor], directory: Path, version: Order) -> None:
    """Save the tensors of one version."""
    path = checkpoint_path(directory, version)
    unfinished = path.with_name(f".{path.name}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
    os.replace(unfinished, path)  # a reader finds all of it or nothing


class Oracle:
    """The checkpoints in a directory, each as a model of its own, read when first asked for."""

    def __init__(self, directory: Path, blank: PreTrainedModel) -> None:
        self._directory = directory
        self._blank = blank
        self._blank.train(False)
        self._models: dict[Order, PreTrainedModel] = {}

    def versions(self) -> list[Order]:
        """The versions that are there, ascending."""
        names = [path.stem.split("-") for path in self._directory.glob("version-*.safetensors")]
        return sorted((int(epoch), int(number)) for _, epoch, number in names)

    def state(self, version: Order) -> dict[str, torch.Tensor]:
        """The tensors of one version. Raises :class:`~weightsync.errors.ConfigurationError` if it has no checkpoint."""
        path = checkpoint_path(self._directory, version)
        if not path.is_file():
            raise ConfigurationError(f"version {version[1]} of epoch {version[0]} has no checkpoint at {path}")
        return load_file(path)

    def model(self, version: Order) -> PreTrainedModel:
        """The model with the weights of one version, and no others. Raises as :meth:`state`, and for tensors that do not fit."""
        found = self._models.get(version)
        if found is None:
            state = self.state(version)
            model = copy.deepcopy(self._blank)
            missing, unexpected = model.load_state_dict(state, strict=False)
            allowed = {_HEAD} if model.config.tie_word_embeddings else set()
            if unexpected or set(missing) - allowed:
                raise ConfigurationError(
                    f"the checkpoint of version {version[1]} of epoch {version[0]} does not fit the model: missing {missing}, "
                    f"unexpected {unexpected}"
                )
            found = self._models[version] = model
        return found

    def adapters(self) -> list[str]:
        """Labels of all versions of adapters that are there."""
        paths = self._directory.glob("adapter-*.safetensors")
        return sorted(path.stem.removeprefix("adapter-").replace("_", "/") for path in paths)

    @contextmanager
    def adapted(self, version: Order, label: str) -> Iterator[PreTrainedModel]:
        """The model of ``version``, which in the block computes with the adapter ``label``, in the order in which PEFT does.

        An empty label is none. Raises as :meth:`model`.
        """
        model, hooks = self.model(version), []
        tensors = load_file(adapter_path(self._directory, label)) if label else {}
        for name in tensors:
            layer, found, _ = name.partition(".lora_A.")
            if found:
                add = partial(_add, tensors[name], tensors[f"{layer}.lora_B.weight"])
                hooks.append(model.get_submodule(layer).register_forward_hook(add))
        try:
            yield model
        finally:
            for hook in hooks:
                hook.remove()


def _add(
    a: torch.Tensor, b: torch.Tensor, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    return (output + linear(linear(inputs[0].to(a.dtype), a), b) * (ALPHA / RANK)).to(output.dtype)
