"""A replica that serves LoRA adapters beside the base weights."""

from __future__ import annotations

from examples.demo.completions_adapter import CompletionsAdapter
from examples.demo.generation import Generator
from weightsync.engines.module_loras import ModuleLoras

__all__ = ["LoraAdapter"]


class LoraAdapter(CompletionsAdapter):
    """Hands versions of adapters to what the generator computes with."""

    def __init__(self, generator: Generator, loras: ModuleLoras) -> None:
        super().__init__(generator)
        self.lora_versions = loras
