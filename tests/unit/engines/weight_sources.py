"""Both shapes that vLLM's ``WeightSource`` has had, as classes of these tests' own. Those of 0.33 were written after its source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

TENSORS = {
    "first.weight": torch.arange(35.0).reshape(7, 5),
    "second.weight": torch.arange(12.0).reshape(3, 4),
    "third.bias": torch.ones(3),
}


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class EarlierSource:
    """Until 0.32: methods, and iteration."""

    def metadata(self) -> list[Meta]:
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]

    def held_names(self) -> set[str] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(TENSORS.items())


class NewerSource:
    """From 0.33 on: a cached property, and one or both walks."""

    def __init__(self, metas: list[Meta], rank: int, local: Callable[[Meta, int], torch.Tensor] | None) -> None:
        self._metas, self._rank, self._piece = metas, rank, local

    @functools.cached_property
    def metadata(self) -> list[Meta]:
        return self._metas

    def implements_iter_local(self) -> bool:
        return self._piece is not None

    def _owned(self) -> list[Meta]:
        return [meta for meta in self._metas if meta.owners is None or self._rank in meta.owners]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((meta.name, TENSORS[meta.name]) for meta in self._owned())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._piece is not None
        return ((meta.name, self._piece(meta, self._rank)) for meta in self._owned())
