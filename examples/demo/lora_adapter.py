"""A replica that serves LoRA adapters beside the base weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from examples.demo.completions_adapter import CompletionsAdapter
from examples.demo.generation import Generator
from weightsync.engines.module_loras import ModuleLoras
from weightsync.model import Manifest, Version
from weightsync.model.lora import AdapterSpec, LoraSlots

__all__ = ["LoraAdapter"]


class LoraAdapter(CompletionsAdapter):
    """Hands versions of adapters to what the generator computes with."""

    def __init__(self, generator: Generator, loras: ModuleLoras) -> None:
        super().__init__(generator)
        self._loras = loras

    def lora_slots(self) -> LoraSlots:
        """How many versions the generator holds at most."""
        return self._loras.slots

    def check_lora(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """Check that the model has the layers that the adapter changes."""
        self._loras.check(spec, manifest)

    def stage_lora(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy the adapter's matrices."""
        return self._loras.stage(label, spec, tensors)

    def register_lora(self, version: Version) -> None:
        """Let requests find the version."""
        self._loras.register(version)

    def drop_lora(self, label: str) -> None:
        """Free the version once no request computes with it."""
        self._loras.drop(label)

    def loras(self) -> Collection[str]:
        """Labels of all versions that are held."""
        return self._loras.labels()
