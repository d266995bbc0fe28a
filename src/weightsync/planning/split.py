"""Splitting of large layout rows into blocks that can be fetched and digested while they are in the cache."""

from __future__ import annotations

import numpy as np

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides
from weightsync.planning.geometry import spread

_MOST_ROWS = 1 << 28  # more blocks than any memory holds: the shape is forged or ``max_bytes`` a mistake


def split_rows(manifest: Manifest, layout: Layout, max_bytes: int) -> Layout:
    """Split the same shards into rows of at most ``max_bytes``. A single element is never cut.

    A box is cut along its outermost dimension into nearly equal blocks. Where one index of that dimension is still larger than
    ``max_bytes``, each index is cut along the next dimension, and so on. The cut depends only on a box's extents and element size,
    so equal boxes on different ranks stay equal. The result is ordered by row, then by position in the box.

    Raises:
        ConfigurationError: ``max_bytes`` is not positive.
        LayoutError: The result would have more than 2**28 rows.
    """
    if max_bytes < 1:
        raise ConfigurationError(f"max_bytes must be a positive number of bytes, not {max_bytes}")
    rows, dims = layout.starts.shape
    if not rows:
        return layout
    extents = layout.stops - layout.starts
    inner = packed_strides(extents, manifest.itemsizes[layout.tensor])  # bytes of one index of each dimension
    if not np.any(inner[:, 0] * extents[:, 0] > max_bytes):
        return layout
    step = np.empty_like(extents)
    cut = np.zeros(rows, bool)  # rows whose cut dimension has been chosen
    for dim in range(dims):
        fits = np.maximum(max_bytes // inner[:, dim], 1)
        parts = -(-extents[:, dim] // fits)
        even = -(-extents[:, dim] // parts)
        step[:, dim] = np.where(cut, extents[:, dim], even)
        cut |= inner[:, dim] <= max_bytes
    parts = -(-extents // step)
    count = np.prod(parts, axis=1)
    if np.prod(parts.astype(np.float64), axis=1).sum() > _MOST_ROWS:
        raise LayoutError(f"splitting a layout into blocks of {max_bytes} bytes would give more than {_MOST_ROWS} rows")
    row, place = spread(count)
    starts = np.empty((len(row), dims), np.int64)
    stops = np.empty_like(starts)
    offset = layout.offset[row]
    for dim in reversed(range(dims)):
        inside = (place % parts[row, dim]) * step[row, dim]
        place //= parts[row, dim]
        starts[:, dim] = layout.starts[row, dim] + inside
        stops[:, dim] = np.minimum(starts[:, dim] + step[row, dim], layout.stops[row, dim])
        offset += inside * layout.strides[row, dim]
    return Layout(manifest, layout.tensor[row], starts, stops, layout.region[row], offset, layout.strides[row], layout.regions)
