"""Bytes of a storage that strided views cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from weightsync.arrays import Int64


class LocalView(NamedTuple):
    """Memory of a tensor on this rank. Equal for tensors that are the same elements in the same order."""

    storage: int
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class ByteCoverage:
    """Bytes of one storage that any of ``views`` covers: sorted ranges that neither overlap nor touch."""

    def __init__(self, views: Iterable[LocalView]) -> None:
        ranges = [_ranges(view) for view in views]
        starts = np.concatenate([np.empty(0, np.int64), *(first for first, _ in ranges)])
        stops = np.concatenate([np.empty(0, np.int64), *(first + length for first, length in ranges)])
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        gaps = starts[1:] > stops[:-1]
        self._starts: Int64 = starts[np.r_[np.ones(len(starts[:1]), np.bool_), gaps]]
        self._stops: Int64 = stops[np.r_[gaps, np.ones(len(stops[:1]), np.bool_)]]
        self._totals: Int64 = np.cumsum(self._stops - self._starts)

    def lacking(self, view: LocalView) -> int:
        """Number of bytes of ``view`` that are not covered. A byte that ``view`` holds several times counts once."""
        other = ByteCoverage([view])
        whole = int((other._stops - other._starts).sum())
        return whole - int((self._before(other._stops) - self._before(other._starts)).sum())

    def _before(self, places: Int64) -> Int64:
        """Number of covered bytes before each of ``places``."""
        if not len(self._starts):
            return np.zeros_like(places)
        index = np.searchsorted(self._starts, places, side="right") - 1
        return np.where(index < 0, 0, self._totals[index] - np.maximum(self._stops[index] - places, 0))


def _ranges(view: LocalView) -> tuple[Int64, int]:
    """Starts of the contiguous ranges of a view, in bytes, and their common length."""
    size = view.dtype.itemsize
    if 0 in view.shape:
        return np.empty(0, np.int64), size
    length, starts = size, np.array([view.offset * size], np.int64)
    for stride, extent in sorted((stride * size, extent) for stride, extent in zip(view.strides, view.shape, strict=True)):
        if stride <= length and len(starts) == 1:
            length += stride * (extent - 1)
        elif extent > 1:
            starts = np.add.outer(np.arange(extent, dtype=np.int64) * stride, starts).reshape(-1)
    return starts, length
