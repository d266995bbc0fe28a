"""Layout of all shards of a rank, stored as columns: seven arrays instead of a hundred thousand objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np

from weightsync.arrays import Int32, Int64
from weightsync.errors import LayoutError, WeightSyncError
from weightsync.model.box import Box
from weightsync.model.manifest import MAX_BYTES, Manifest

_COLUMNS = {"tensor": "<i4", "starts": "<i8", "stops": "<i8", "region": "<i4", "offset": "<i8", "strides": "<i8"}
_WIDE = frozenset({"starts", "stops", "strides", "source_strides"})
"""Columns with an entry for each dimension, of layouts and of pieces."""


class LayoutColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout in a message: little-endian columns, validated by :meth:`Layout.from_columns`."""

    rows: int
    dims: int
    tensor: bytes
    starts: bytes
    stops: bytes
    region: bytes
    offset: bytes
    strides: bytes
    regions: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]


class Layout:
    """Shards of one rank, one in each row, and their location in its memory.

    ========  ==================  ==========================================================================
    column    type                meaning
    ========  ==================  ==========================================================================
    tensor    int32[rows]         index into the manifest; ascending
    starts    int64[rows, dims]   first index of the shard's box in each dimension, in elements
    stops     int64[rows, dims]   one past the last index
    region    int32[rows]         which of the rank's memory regions holds the shard
    offset    int64[rows]         bytes from the region's start to the box's first element
    strides   int64[rows, dims]   bytes between neighbors in each dimension; not negative
    regions   tuple of int        bytes of each region
    ========  ==================  ==========================================================================

    ``dims`` is the manifest's. Tensors of fewer dimensions are padded in front with dimensions of extent one. Empty shards are left
    out.

    Raises:
        LayoutError: A box is outside its tensor, or a shard outside its region.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensor: Int32,
        starts: Int64,
        stops: Int64,
        region: Int32,
        offset: Int64,
        strides: Int64,
        regions: tuple[int, ...],
    ) -> None:
        rows, dims = len(tensor), manifest.dims
        wide, narrow = (starts, stops, strides), (tensor, region, offset)
        if any(column.shape != (rows, dims) for column in wide) or any(column.shape != (rows,) for column in narrow):
            raise LayoutError(f"layout columns do not have {rows} rows of {dims} dimensions")
        self.tensor, self.starts, self.stops = tensor, starts, stops
        self.region, self.offset, self.strides, self.regions = region, offset, strides, regions
        self._check(manifest)

    def _check(self, manifest: Manifest) -> None:
        if not len(self.tensor):
            return
        if self.tensor.min() < 0 or self.tensor.max() >= len(manifest) or np.any(np.diff(self.tensor) < 0):
            raise LayoutError("the layout names tensors that are not in the manifest, or not in ascending order")
        bad = (self.starts < 0) | (self.starts >= self.stops) | (self.stops > manifest.shapes[self.tensor])
        if bad.any():
            row = int(np.argmax(bad.any(axis=1)))
            spec = manifest[int(self.tensor[row])]
            box = (self.starts[row].tolist(), self.stops[row].tolist())
            raise LayoutError(f"a shard of {spec.name} is empty or outside its shape {list(spec.shape)}: {box}")
        sizes = np.array([*self.regions, 0], np.int64)
        if self.region.min() < 0 or self.region.max() >= len(self.regions) or self.strides.min() < 0 or self.offset.min() < 0:
            raise LayoutError("the layout has a region that does not exist, or a negative offset or stride")
        # Floating point first, because a forged stride could wrap the exact arithmetic around to a legal value.
        steps = self.stops - self.starts - 1
        rough = self.offset + (steps.astype(np.float64) * self.strides).sum(axis=1)
        if np.any(rough > 2.0**62) or np.any(self.ends(manifest) > sizes[self.region]):
            raise LayoutError("a shard reaches past the end of its memory region")

    def ends(self, manifest: Manifest) -> Int64:
        """Bytes from each region's start to one past the shard's last element, ``int64[rows]``."""
        last: Int64 = self.offset + ((self.stops - self.starts - 1) * self.strides).sum(axis=1)
        return last + manifest.itemsizes[self.tensor]

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int, manifest: Manifest) -> Box:
        """Box of one row, without padding."""
        rank = len(manifest[int(self.tensor[row])].shape)
        first = manifest.dims - rank
        return Box(tuple(self.starts[row, first:].tolist()), tuple(self.stops[row, first:].tolist()))

    def sizes(self) -> Int64:
        """Elements of each shard, ``int64[rows]``."""
        sizes: Int64 = np.prod(self.stops - self.starts, axis=1)
        return sizes

    def contiguous(self, manifest: Manifest) -> bool:
        """Whether each shard lies in memory without gaps, in C order."""
        extents = self.stops - self.starts
        packed = packed_strides(extents, manifest.itemsizes[self.tensor])
        return not np.any((self.strides != packed) & (extents > 1))

    def nbytes(self, manifest: Manifest) -> int:
        """Bytes of all shards."""
        return int((self.sizes() * manifest.itemsizes[self.tensor]).sum())

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over all rows. Both ends compare it to check that a plan still fits."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.to_columns()), digest_size=16).hexdigest()

    def to_columns(self) -> LayoutColumns:
        """Encode the layout as a message."""
        return LayoutColumns(rows=len(self), dims=int(self.starts.shape[1]), regions=self.regions, **encoded(self, _COLUMNS))

    @classmethod
    def from_columns(cls, manifest: Manifest, columns: LayoutColumns) -> Layout:
        """Decode and validate the layout in a message.

        Raises:
            LayoutError: The layout does not fit ``manifest``.
        """
        rows, dims = columns.rows, columns.dims
        if rows < 0 or dims != manifest.dims or any(not 0 <= size <= MAX_BYTES for size in columns.regions):
            raise LayoutError(f"a layout message of {rows} rows and {dims} dimensions does not fit the manifest")
        return cls(manifest, regions=columns.regions, **decoded(columns, rows, dims, _COLUMNS, "a layout message", LayoutError))


def encoded(rows: object, columns: Mapping[str, str]) -> dict[str, bytes]:
    """Encode the columns of a layout or of pieces for a message. ``columns`` are their names and types there."""
    return {name: np.ascontiguousarray(getattr(rows, name), kind).tobytes() for name, kind in columns.items()}


def decoded(
    message: object, rows: int, dims: int, columns: Mapping[str, str], what: str, error: type[WeightSyncError]
) -> dict[str, Any]:
    """Decode what :func:`encoded` made. Raises ``error`` for a column of the wrong length; ``what`` names the message."""
    arrays = {}
    for name, kind in columns.items():
        data: bytes = getattr(message, name)
        width = dims if name in _WIDE else 1
        if len(data) != rows * width * np.dtype(kind).itemsize:
            raise error(f"column {name!r} of {what} has {len(data)} bytes, the wrong size for {rows} rows")
        array = np.frombuffer(data, kind).astype(np.dtype(kind).newbyteorder("="), copy=False)
        arrays[name] = array.reshape(rows, width) if name in _WIDE else array
    return arrays


def packed_strides(extents: Int64, itemsizes: Int64) -> Int64:
    """Bytes between neighbors in each dimension of boxes that lie in memory without gaps, in C order.

    Args:
        extents: Elements of each box, ``int64[rows, dims]``, as the result.
        itemsizes: Bytes of an element, ``int64[rows]``.
    """
    strides = np.empty_like(extents)
    step = itemsizes
    for dim in reversed(range(extents.shape[1])):
        strides[:, dim] = step
        step = step * extents[:, dim]
    return strides


def padded_boxes(boxes: Sequence[Box], dims: int) -> tuple[Int64, Int64]:
    """First indices and stops of ``boxes``, ``int64[boxes, dims]`` each, padded in front as the columns of :class:`Layout`."""
    starts = np.zeros((len(boxes), dims), np.int64)
    stops = np.ones_like(starts)
    for row, box in enumerate(boxes):
        if box.starts:
            starts[row, -len(box.starts) :], stops[row, -len(box.stops) :] = box.starts, box.stops
    return starts, stops
