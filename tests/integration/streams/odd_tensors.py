"""Tensors that look plain and cannot be copied."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Wrapper", "freed"]


class Wrapper(torch.Tensor):
    """Copies nothing when it is copied from, as a careless subclass may."""

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return args[0]


def freed() -> torch.Tensor:
    """As FSDP leaves a gathered parameter: to read it is a segmentation fault."""
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor
