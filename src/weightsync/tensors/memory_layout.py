"""Memory layouts: parameters in place, or shards packed into one region."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from weightsync.arrays import Int32, Int64
from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides, padded_boxes
from weightsync.tensors.shards import Shard, dtype_name, ordered

_ALIGNMENT = 64  # bytes, of shards that are packed


def layout_in_place(
    manifest: Manifest, shards: Iterable[Shard], block_bytes: int | None = 1 << 20
) -> tuple[Layout, tuple[int, ...]]:
    """Layout of memory that is written in place.

    A region is one storage, in the order of first use. Rows of more than ``block_bytes`` are split, so that they can be digested
    while they are in the cache; with ``None`` each shard is one row.

    Returns:
        The layout, and the base address of each region.

    Raises:
        LayoutError: The dtype differs from the manifest's, or two elements may share bytes (an expanded tensor).
    """
    rows = ordered(manifest, shards)
    sizes: dict[int, int] = {}
    """Bytes of each storage, by its address."""
    bases: list[int] = []
    offset = np.zeros(len(rows), np.int64)
    for row, shard in enumerate(rows):
        spec = manifest[manifest.index[shard.name]]
        if dtype_name(shard.tensor.dtype) != spec.dtype:
            raise LayoutError(f"{shard.name} is {dtype_name(shard.tensor.dtype)} in memory, but is published as {spec.dtype}")
        _check_apart(shard)
        storage = shard.tensor.untyped_storage()
        bases.append(storage.data_ptr())
        sizes[bases[-1]] = storage.nbytes()
        offset[row] = shard.tensor.data_ptr() - bases[-1]
    numbers = {base: number for number, base in enumerate(sizes)}
    region = np.array([numbers[base] for base in bases], np.int32)
    tensor, starts, stops, strides = _columns(manifest, rows)
    layout = Layout(manifest, tensor, starts, stops, region, offset, strides, tuple(sizes.values()))
    if block_bytes is not None:
        from weightsync.planning.split import split_rows

        layout = split_rows(manifest, layout, block_bytes)
    return layout, tuple(sizes)


def packed_layout(manifest: Manifest, shards: Iterable[Shard]) -> Layout:
    """Layout of one region that holds all shards, contiguous, in the manifest's dtype, each aligned to 64 bytes."""
    rows = ordered(manifest, shards)
    tensor, starts, stops, _ = _columns(manifest, rows)
    extents = stops - starts
    strides = packed_strides(extents, manifest.itemsizes[tensor])
    sizes = strides[:, 0] * extents[:, 0]
    ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
    offset = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(rows)]
    total = int(ends[-1]) if len(rows) else 0
    return Layout(manifest, tensor, starts, stops, np.zeros(len(rows), np.int32), offset, strides, (total,))


def _columns(manifest: Manifest, rows: list[Shard]) -> tuple[Int32, Int64, Int64, Int64]:
    """Tensor index, starts, stops and byte strides, padded in front to the manifest's dimensions."""
    tensor = np.array([manifest.index[shard.name] for shard in rows], np.int32)
    starts, stops = padded_boxes([shard.box for shard in rows], manifest.dims)
    strides = np.zeros_like(starts)
    for row, shard in enumerate(rows):
        if shard.shape:
            strides[row, -len(shard.shape) :] = shard.tensor.stride()
            strides[row] *= shard.tensor.element_size()
    # The stride of a dimension of one element has no meaning, and torch leaves arbitrary values there.
    strides[stops - starts == 1] = 0
    return tensor, starts, stops, strides


def _check_apart(shard: Shard) -> None:
    """Reject memory in which writing one element may change another."""
    reach = 0  # distance from the first to the last element that the dimensions so far can address
    sizes: torch.Size = shard.tensor.shape
    for stride, extent in sorted(zip(shard.tensor.stride(), sizes, strict=True)):
        if extent > 1:
            if stride <= reach:
                raise LayoutError(
                    f"memory of {shard.name} overlaps itself (shape {list(sizes)}, strides {list(shard.tensor.stride())}): "
                    "an expanded view cannot be written in place. Copy it with .contiguous()"
                )
            reach += stride * (extent - 1)
