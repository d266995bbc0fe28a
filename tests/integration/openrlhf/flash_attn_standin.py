"""What OpenRLHF imports of flash-attn, which has no build for CPUs. None of it is called where attention is eager and unpacked."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("flash-attn has no build for CPUs")


def install() -> None:
    for name, functions in {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # Transformers looks for it, and then for a CUDA device
        for function in functions:
            setattr(module, function, _absent)
        sys.modules[name] = module
