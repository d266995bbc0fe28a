"""Layouts of all members of one end of a transfer, indexed by tensor, and the groups of tensors that are sharded alike.

A model has tens of thousands of tensors but few *geometries*: expert 17 of layer 40 is sharded exactly like expert 3 of layer 5.
Work that depends only on boxes is done once for each geometry (:func:`geometries`) and expanded to tensors by array indexing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Int32, Int64, UInt64
from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest

_LANES = 2  # two independent 64-bit sums: with 128 bits, unequal geometries do not collide by chance
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: UInt64) -> UInt64:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood) in place. Returns its argument.

    Every input bit affects every output bit.
    """
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _keys(lane: int, count: int) -> UInt64:
    """Return ``count`` fixed odd multipliers, different for each lane."""
    seeds = (np.arange(count, dtype=np.uint64) + np.uint64(1 + 1009 * lane)) * np.uint64(_GOLDEN)
    return mix64(seeds) | np.uint64(1)


def _signature(columns: Sequence[Int64 | UInt64], lane: int) -> UInt64:
    """Hash each row of ``columns`` to 64 bits: a keyed linear sum, mixed."""
    keys = _keys(lane, len(columns))
    total = columns[0].astype(np.uint64, copy=False) * keys[0]
    for column, key in zip(columns[1:], keys[1:], strict=True):
        total += column.astype(np.uint64, copy=False) * key
    return mix64(total)


def ranges(first: Int64, count: Int64) -> Int64:
    """Concatenate ranges: ``count[0]`` numbers from ``first[0]``, then ``count[1]`` numbers from ``first[1]``, and so on."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - count), count) + np.arange(total, dtype=np.int64)


def spread(counts: Int64) -> tuple[Int64, Int64]:
    """Split each row ``i`` into ``counts[i]`` parts. Returns the row of every part and its number within the row."""
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts), ranges(np.zeros_like(counts), counts)


@dataclass(frozen=True, eq=False)
class Rows:
    """Layout rows of the tensors that represent a geometry, ordered by member, geometry, row.

    ``order`` is the row's position among that member's rows of the tensor.
    """

    group: Int64
    member: Int64
    order: Int64
    starts: Int64
    stops: Int64

    def __len__(self) -> int:
        return len(self.group)


class ShardingIndex:
    """Layouts of several members, in the given order.

    ``first[m, t]`` is the first row of tensor ``t`` in member ``m``'s layout; ``first[m, t + 1]`` is one past the last
    (``int32[members, tensors + 1]``).

    Raises:
        LayoutError: A member is named twice, or a layout was made for another manifest.
    """

    def __init__(self, manifest: Manifest, members: Sequence[str], layouts: Sequence[Layout]) -> None:
        self.manifest = manifest
        self.members = tuple(members)
        self.layouts = tuple(layouts)
        if len(set(self.members)) != len(self.members):
            twice = sorted({name for name in self.members if self.members.count(name) > 1})
            raise LayoutError(f"members named twice: {', '.join(twice)}")
        for name, layout in zip(self.members, self.layouts, strict=True):
            if layout.starts.shape[1] != manifest.dims or (len(layout) and int(layout.tensor[-1]) >= len(manifest)):
                raise LayoutError(f"the layout of {name} was made for another manifest")
        self.first: Int32 = np.zeros((len(self.members), len(manifest) + 1), np.int32)
        for row, layout in zip(self.first, self.layouts, strict=True):
            np.cumsum(np.bincount(layout.tensor, minlength=len(manifest)), out=row[1:])

    def holders(self, tensor: int) -> list[str]:
        """Members that hold rows of a tensor."""
        return [name for name, first in zip(self.members, self.first, strict=True) if first[tensor + 1] > first[tensor]]

    def signatures(self) -> list[UInt64]:
        """Two hashes for each tensor over all rows of all members: the sum over member, order and box of each row."""
        lanes = [np.zeros(len(self.manifest), np.uint64) for _ in range(_LANES)]
        for index, (layout, first) in enumerate(zip(self.layouts, self.first, strict=True)):
            if not len(layout):
                continue
            held = np.flatnonzero(np.diff(first))
            order = np.arange(len(layout), dtype=np.int64) - first[layout.tensor]
            order += (index + 1) << 32
            columns = [order, *layout.starts.T, *layout.stops.T]
            for lane, sums in enumerate(lanes):
                sums[held] += np.add.reduceat(_signature(columns, lane), first[held])
        return lanes

    def rows(self, tensors: Int64) -> Rows:
        """Rows of ``tensors``. Their geometry is the position in ``tensors``."""
        none, empty = np.zeros(0, np.int64), np.zeros((0, self.manifest.dims), np.int64)
        parts = [(none, none, none, empty, empty)]
        for index, (layout, first) in enumerate(zip(self.layouts, self.first, strict=True)):
            begin = first[tensors].astype(np.int64)
            count = first[tensors + 1] - begin
            rows = ranges(begin, count)
            group, member = np.repeat(np.arange(len(tensors)), count), np.full(len(rows), index, np.int64)
            parts.append((group, member, rows - np.repeat(begin, count), layout.starts[rows], layout.stops[rows]))
        return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Geometries:
    """Groups of tensors that are sharded alike.

    ``of[t]`` is tensor ``t``'s geometry, ``tensor[g]`` the first tensor of geometry ``g``, ``count[g]`` the number of its tensors.
    """

    of: Int64
    tensor: Int64
    count: Int64

    def __len__(self) -> int:
        return len(self.tensor)


def geometries(manifest: Manifest, *sides: ShardingIndex) -> Geometries:
    """Group the tensors by shape, element size, and the boxes, in order, of every member of ``sides``."""
    if not len(manifest):
        none = np.zeros(0, np.int64)
        return Geometries(none, none, none)
    columns: list[Int64 | UInt64] = [manifest.itemsizes, *manifest.shapes.T]
    for side in sides:
        columns += side.signatures()
    low, high = (_signature(columns, lane) for lane in range(_LANES))
    order = np.lexsort((low, high))
    changes = (np.diff(low[order]) != 0) | (np.diff(high[order]) != 0)
    begin = np.flatnonzero(np.concatenate([[True], changes]))
    heads = order[begin]  # the sort is stable: the first of a run is the tensor with the smallest index
    rank = np.empty(len(heads), np.int64)
    rank[np.argsort(heads)] = np.arange(len(heads))
    of = np.empty(len(manifest), np.int64)
    count = np.diff(np.append(begin, len(order)))
    of[order] = np.repeat(rank, count)
    return Geometries(of, np.sort(heads), np.bincount(of, minlength=len(heads)))
