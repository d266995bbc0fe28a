"""Copy table: strided pieces cut into two-dimensional tiles by array operations. All copy kernels use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from weightsync.arrays import Bools, Int32, Int64
from weightsync.errors import LayoutError, PlanMismatch
from weightsync.model import Layout, Manifest
from weightsync.planning.geometry import spread
from weightsync.tensors.digest import positions

if TYPE_CHECKING:
    import torch

    from weightsync.planning.pieces import Pieces


TILE_BYTES = 1 << 20
"""Most bytes of one tile that :func:`tiles_of` makes."""

_MOST_TILES = 1 << 23  # a table of 830 MiB; a forged stride could request one copy for each element
_KEYS = 7  # columns of a table before the keys
BYTE_STEPS = (1, 1, 0, 1)
"""Steps from byte to byte of a run: in the source, the target, the flattened leading index, and the last dimension."""


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Strided 2-D byte copies, one in each row: ``rows`` runs of ``row_bytes`` bytes.

    =============  ===========  ========================================================================
    column         type         meaning
    =============  ===========  ========================================================================
    region         int32[n]     the source publisher's memory region
    source         int64[n]     bytes from that region's start to the first run
    source_stride  int64[n]     bytes between runs in the source
    target         int64[n]     absolute address of the first run in this process
    target_stride  int64[n]     bytes between runs in the target
    rows           int64[n]     number of runs, at least one
    row_bytes      int64[n]     bytes of a run, at least one
    keys           int64[n, 6]  the tile's position in its tensor, for its digest; ``None`` if unknown
    =============  ===========  ========================================================================

    The six ``keys`` are: the target layout's row; the first run's index over the tensor's leading dimensions, and the distance to
    the next run's; the first run's byte in the last dimension, and the distance to the next run's; the digest blocks of a tensor
    row. A run with ``keys`` lies within one tensor row. Keys never leave the process.
    """

    region: Int32
    source: Int64
    source_stride: Int64
    target: Int64
    target_stride: Int64
    rows: Int64
    row_bytes: Int64
    keys: Int64 | None = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def nbytes(self) -> int:
        """Bytes that the tiles move."""
        return int((self.rows * self.row_bytes).sum())

    @cached_property
    def table(self) -> Int64:
        """All columns side by side, ``int64[n, 13]``, as the compiled copies read them. Cached: the columns must not change."""
        columns = (self.source, self.source_stride, self.target, self.target_stride, self.rows, self.row_bytes)
        table = np.zeros((len(self), _KEYS + 6), np.int64)
        table[:, 0] = self.region
        for column, values in enumerate(columns, 1):
            table[:, column] = values
        if self.keys is not None:
            table[:, _KEYS:] = self.keys
        return table

    @cached_property
    def table_address(self) -> int:
        """Address of :attr:`table`."""
        return self.table.ctypes.data

    @cached_property
    def rows_named(self) -> int:
        """One more than the largest layout row in ``keys``; -1 if keys are missing or negative."""
        if self.keys is None or (len(self.keys) and self.keys[:, 0].min() < 0):
            return -1
        return int(self.keys[:, 0].max()) + 1 if len(self.keys) else 0

    def of_rows(self, wanted: Bools) -> CopyTable:
        """Return the tiles, which have keys, of ``wanted`` rows of the target's layout, ``bool[rows]``."""
        return CopyTable.of_table(self.table[wanted[self.table[:, _KEYS]]])

    def moved(self, distances: Int64) -> CopyTable:
        """Return the tiles, which have keys, to targets that are ``distances[row]`` bytes further, ``int64[rows]``."""
        table = self.table.copy()
        table[:, 3] += distances[table[:, _KEYS]]
        return CopyTable.of_table(table)

    @classmethod
    def of_table(cls, table: Int64) -> CopyTable:
        """Make tiles from ``int64[n, 13]``, with columns in the order above."""
        source, source_stride, target, target_stride, rows, row_bytes = (np.ascontiguousarray(c) for c in table[:, 1:_KEYS].T)
        region = table[:, 0].astype(np.int32)
        return cls(region, source, source_stride, target, target_stride, rows, row_bytes, table[:, _KEYS:])

    @classmethod
    def empty(cls) -> CopyTable:
        """Return no tiles."""
        return cls.of_table(joined_tables(()))


def joined_tables(tables: Iterable[CopyTable]) -> Int64:
    """Return the tiles of ``tables``, one table after the other, as :attr:`CopyTable.table` has them."""
    return np.concatenate([np.empty((0, _KEYS + 6), np.int64), *(tiles.table for tiles in tables)])


def tiles_of(
    manifest: Manifest,
    pieces: Pieces,
    layout: Layout,
    addresses: Sequence[int],
    groups: Sequence[tuple[int, int]],
) -> list[list[CopyTable]]:
    """Convert the pieces that one target rank receives to copy tables, ``[source][group]``.

    Tiles have keys (:class:`CopyTable`). Dimensions that are contiguous at both ends are merged. What is left beyond two dimensions
    becomes several tiles of at most :data:`TILE_BYTES` each. The publisher checks the source bounds
    (:func:`~weightsync.tensors.copies.check_tiles`).

    Args:
        manifest: The tensors.
        pieces: The pieces.
        layout: The target's layout; ``pieces.target_row`` are its rows.
        addresses: Base address of each of its regions.
        groups: Ascending half-open ranges of its rows.

    Raises:
        PlanMismatch: A piece leaves its target row, or fills a row that no group holds, or there would be too many tiles.
        LayoutError: The number of addresses differs from the number of regions.
    """
    if len(addresses) != len(layout.regions):
        raise LayoutError(f"{len(layout.regions)} memory regions, but {len(addresses)} addresses")
    row = pieces.target_row.astype(np.int64)
    _check_targets(pieces, layout, row)
    sources = len(pieces.sources)
    tensor = layout.tensor[row]
    shapes, itemsizes = manifest.shapes[tensor], manifest.itemsizes[tensor]
    base = np.array([*addresses, 0], np.int64)[layout.region[row]] + layout.offset[row]
    target = base + ((pieces.starts - layout.starts[row]) * layout.strides[row]).sum(axis=1)
    index_strides, byte_strides, blocks = positions(shapes, itemsizes)
    strides = np.stack([pieces.source_strides, layout.strides[row], index_strides, byte_strides])
    firsts = np.stack(
        [
            pieces.source_offset,
            target,
            (pieces.starts * index_strides).sum(axis=1),
            (pieces.starts * byte_strides).sum(axis=1),
        ]
    )
    group = _group_of(row, groups)
    order = np.lexsort((row, group, pieces.source))
    size, strides = merge_dimensions((pieces.stops - pieces.starts)[order], strides[:, order], itemsizes[order], BYTE_STEPS)
    fixed = np.stack([pieces.source_region, row, blocks], axis=1)[order]
    table, piece = cut_runs(size, strides, firsts[:, order], fixed)
    keys = (pieces.source[order].astype(np.int64) * max(len(groups), 1) + group[order])[piece]
    edges = np.searchsorted(keys, np.arange(sources * max(len(groups), 1) + 1)).tolist()
    nothing = CopyTable.empty()
    cut = [CopyTable.of_table(table[first:last]) if last > first else nothing for first, last in pairwise(edges)]
    return [cut[source * len(groups) : (source + 1) * len(groups)] for source in range(sources)]


def tiles_between(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> CopyTable:
    """Make one table, without keys, that copies each of ``sources`` to the tensor of ``targets`` at the same position.

    Any strides are allowed. ``source`` is an absolute address, so the only region starts at address 0.

    Raises:
        LayoutError: The tensors of a pair differ in shape or element size.
    """
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    for target, source in pairs:
        if target.shape != source.shape or target.element_size() != source.element_size():
            raise LayoutError(
                f"a tensor of {source.dtype}{list(source.shape)} cannot be copied onto {target.dtype}{list(target.shape)}"
            )
    if not pairs:
        return CopyTable.empty()
    # Contiguous pairs, the usual case, are one run; only other pairs need their dimensions.
    solid = [target.is_contiguous() and source.is_contiguous() for target, source in pairs]
    count, dims = len(pairs), max((target.ndim for (target, _), flat in zip(pairs, solid, strict=True) if not flat), default=1)
    itemsize = np.array([target.element_size() for target, _ in pairs], np.int64)
    extents, steps = np.ones((count, dims), np.int64), np.ones((2, count, dims), np.int64)
    extents[:, -1] = [target.numel() for target, _ in pairs]
    for row in np.flatnonzero(~np.array(solid)).tolist():
        target, source = pairs[row]
        extents[row, dims - target.ndim :] = target.shape
        steps[0, row, dims - target.ndim :] = source.stride()
        steps[1, row, dims - target.ndim :] = target.stride()
    steps *= itemsize[:, None]
    first = np.array([[source.data_ptr(), target.data_ptr()] for target, source in pairs], np.int64).T
    # Nothing is digested. The strides of the digest columns follow the source's, so that they never prevent a merge.
    strides = np.stack([steps[0], steps[1], np.zeros_like(steps[0]), steps[0]])
    size, strides = merge_dimensions(extents, strides, itemsize, BYTE_STEPS)
    fixed = np.zeros((count, 3), np.int64)
    table, _ = cut_runs(size, strides, np.stack([first[0], first[1], np.zeros(count, np.int64), first[0]]), fixed)
    return replace(CopyTable.of_table(table), keys=None)


def _check_targets(pieces: Pieces, layout: Layout, row: Int64) -> None:
    if not len(row):
        return
    if row.min() < 0 or row.max() >= len(layout) or pieces.source.min() < 0 or pieces.source.max() >= len(pieces.sources):
        raise PlanMismatch("the plan names rows or sources that do not exist")
    outside = (pieces.starts < layout.starts[row]) | (pieces.stops > layout.stops[row]) | (pieces.starts >= pieces.stops)
    if np.any(outside):
        raise PlanMismatch("the plan holds a piece that is empty or outside the row that it fills")


def _group_of(row: Int64, groups: Sequence[tuple[int, int]]) -> Int64:
    firsts = np.array([first for first, _ in groups], np.int64)
    lasts = np.array([last for _, last in groups], np.int64)
    group = np.searchsorted(firsts, row, side="right").astype(np.int64) - 1
    if len(row) and (not len(groups) or np.any(group < 0) or np.any(row >= lasts[group])):
        raise PlanMismatch("the plan fills a row that belongs to no group")
    return group


def merge_dimensions(extents: Int64, strides: Int64, run: Int64 | int, steps: Sequence[int]) -> tuple[Int64, Int64]:
    """Merge neighboring dimensions through which all ``strides``, ``int64[kinds, n, dims]``, step evenly.

    The innermost is preceded by a dimension of ``run`` elements, which are ``steps`` apart (one for each kind).

    Returns:
        Extents ``int64[n, dims + 1]`` and strides ``int64[kinds, n, dims + 1]``. Column 0 begins with the run, column 1 is the
        longest other dimension, further columns are the rest.
    """
    count, dims = extents.shape
    every = np.arange(count)
    level = np.zeros(count, np.int64)
    size = np.ones((count, dims + 1), np.int64)
    merged = np.zeros((len(steps), count, dims + 1), np.int64)
    size[:, 0] = run
    merged[:, :, 0] = np.array(steps)[:, None]
    for dim in range(dims - 1, -1, -1):
        extent = extents[:, dim]
        even = np.all(strides[:, :, dim] == size[every, level] * merged[:, every, level], axis=0)
        single = extent == 1
        grow = np.flatnonzero(even & ~single)
        size[grow, level[grow]] *= extent[grow]
        new = np.flatnonzero(~even & ~single)
        level[new] += 1
        size[new, level[new]] = extent[new]
        merged[:, new, level[new]] = strides[:, new, dim]
    # The number of tiles is smallest if a tile's rows run along the longest remaining dimension.
    longest = 1 + np.argmax(size[:, 1:], axis=1)
    for column in (size, *merged):
        column[every, longest], column[:, 1] = column[:, 1].copy(), column[every, longest].copy()
    return size, merged


def cut_runs(size: Int64, strides: Int64, firsts: Int64, fixed: Int64, limit: int = TILE_BYTES) -> tuple[Int64, Int64]:
    """Build the tile table ``int64[n, 13]`` of merged pieces, in tiles of at most ``limit`` bytes, and the piece of each tile.

    ``size`` and ``strides`` are those of :func:`merge_dimensions`. ``firsts`` is ``int64[4, pieces]``: the start of source, target,
    index and byte. ``fixed`` holds region, row and blocks.
    """
    run, rows = size[:, 0], size[:, 1]
    rows_each = np.maximum(limit // run, 1)
    down = -(-rows // rows_each)
    across = -(-run // limit)
    counts = np.prod(size[:, 2:], axis=1) * down * across
    if float(counts.sum(dtype=np.float64)) > _MOST_TILES:
        raise PlanMismatch(
            f"the plan needs more than {_MOST_TILES:,} separate copies, because the shards of both ends interleave too finely: "
            'use delivery="streamed", or contiguous shards at the trainer'
        )
    piece, rest = spread(counts)
    first_byte = rest % across[piece] * limit
    rest //= across[piece]
    first_row = rest % down[piece] * rows_each[piece]
    rest //= down[piece]
    begin = firsts[:, piece] + first_row * strides[:, piece, 1] + first_byte * strides[:, piece, 0]
    for dim in range(2, size.shape[1]):
        begin += rest % size[piece, dim] * strides[:, piece, dim]
        rest //= size[piece, dim]
    table = np.empty((len(piece), _KEYS + 6), np.int64)
    table[:, [0, 7, 12]] = fixed[piece]
    table[:, [1, 3, 8, 10]] = begin.T
    table[:, [2, 4, 9, 11]] = strides[:, piece, 1].T
    table[:, 5] = np.minimum(rows_each[piece], rows[piece] - first_row)
    table[:, 6] = np.minimum(limit, run[piece] - first_byte)
    return table, piece
