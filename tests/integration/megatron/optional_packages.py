"""Empty stand-ins for what Megatron-Bridge imports and its converters do not use: TransformerEngine needs CUDA to be installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

__all__ = ["stand_in"]

NAMES = (
    "apex", "datasets", "einops", "fla", "hydra", "mamba_ssm", "megatron_energon", "modelopt", "nvidia_resiliency_ext",
    "omegaconf", "open_clip", "qwen_vl_utils", "timm", "transformer_engine", "transformer_engine_torch", "triton", "wandb",
)  # fmt: skip


class Empty(ModuleType):
    """Any name in it is a class of modules if it is capitalized, otherwise a package, which is a function and a decorator too."""

    __version__ = "2.9.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (torch.nn.Module,), {}) if name[0].isupper() else Empty(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else self


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Let the packages be imported. What would find them and ask for their versions is imported before."""
    for package in ("megatron.core", "torch._dynamo", "torch._inductor", "transformers"):
        importlib.import_module(package)
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return "2.9.0" if distribution_name in ("transformer-engine", "transformer_engine") else known(distribution_name)

    importlib.metadata.version = version
    sys.meta_path.insert(0, Finder())
