"""Table for the copy kernel: strided pieces cut into tiles of at most 64 KiB, shuffled. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Int64
from weightsync.errors import ProtocolError
from weightsync.planning.geometry import spread
from weightsync.tensors.copy_table import CopyTable

TILE_BYTES = 1 << 16
"""Most bytes of one tile, which is the work of one program."""

_MOST_STRIDE = 1 << 31


@dataclass(frozen=True, eq=False)
class KernelTable:
    """What a kernel works on, as :mod:`weightsync.tensors.cuda.kernels` describes it: a column for each item.

    The items of group ``i`` are those from ``first[i]`` to ``first[i + 1]``. ``nbytes`` is what all of them move or read.
    """

    columns: Int64
    first: Int64
    nbytes: int

    def __len__(self) -> int:
        return int(self.columns.shape[1])


class DeviceCopyTable(KernelTable):
    """Device tiles, ``int64[4, tiles]``, by groups.

    The tiles of a single publisher are ordered by target, the fastest order for both memories. With several publishers the order
    is random but reproducible: every link is busy to the end, readers do not all read the same publisher at once, and tiles that
    wait for a link mix with tiles that do not.
    """

    @classmethod
    def build(cls, groups: Sequence[Sequence[tuple[CopyTable, Sequence[int]]]], *, tile_bytes: int = TILE_BYTES) -> DeviceCopyTable:
        """Build the table of ``groups``: for each, the tiles by publisher, with the device address of each region.

        Raises:
            ProtocolError: A tile names a region without an address.
        """
        parts = [_ordered([_cut(tiles, bases, tile_bytes) for tiles, bases in group if len(tiles)]) for group in groups]
        first = np.cumsum([0, *(part.shape[1] for part in parts)]).astype(np.int64)
        columns = np.ascontiguousarray(np.concatenate(parts, axis=1)) if parts else np.empty((4, 0), np.int64)
        return cls(columns, first, sum(tiles.nbytes for group in groups for tiles, _ in group))


def _ordered(publishers: Sequence[Int64]) -> Int64:
    """Merge the tiles of all publishers into one table."""
    if not publishers:
        return np.empty((4, 0), np.int64)
    if len(publishers) == 1:
        return publishers[0][:, np.argsort(publishers[0][1], kind="stable")]
    together = np.concatenate(publishers, axis=1)
    return together[:, np.random.default_rng(together.shape[1]).permutation(together.shape[1])]


def _cut(tiles: CopyTable, bases: Sequence[int], tile_bytes: int) -> Int64:
    """Convert one publisher's tiles to columns, cut to at most ``tile_bytes``."""
    if len(tiles) and (tiles.region.min() < 0 or tiles.region.max() >= len(bases)):
        raise ProtocolError(f"a tile names memory region {int(tiles.region.max())} of a publisher that has {len(bases)}")
    source = np.array([*bases, 0], np.int64)[tiles.region] + tiles.source
    target, source_stride, target_stride = tiles.target, tiles.source_stride, tiles.target_stride
    runs, size = tiles.rows, tiles.row_bytes
    # Runs that are contiguous at both ends are merged into one run.
    solid = (runs == 1) | ((source_stride == size) & (target_stride == size))
    size, runs = np.where(solid, size * runs, size), np.where(solid, 1, runs)

    # Cut long runs into columns, each with all its runs; then distribute the runs, as many as fit a tile.
    tile, part = spread(-(-size // tile_bytes))
    before = part * tile_bytes
    source, target, runs = source[tile] + before, target[tile] + before, runs[tile]
    source_stride, target_stride = source_stride[tile], target_stride[tile]
    size = np.minimum(size[tile] - before, tile_bytes)
    # Runs whose stride does not fit its column become separate tiles, which need no stride.
    most = np.where(np.maximum(source_stride, target_stride) < _MOST_STRIDE, tile_bytes // size, 1)
    tile, part = spread(-(-runs // most))
    before = part * most[tile]
    source_stride, target_stride, size = source_stride[tile], target_stride[tile], size[tile]
    source, target = source[tile] + before * source_stride, target[tile] + before * target_stride
    runs = np.minimum(most[tile], runs[tile] - before)
    single = runs == 1  # its strides are arbitrary and must not affect the alignment test
    source_stride, target_stride = np.where(single, 0, source_stride), np.where(single, 0, target_stride)
    return np.stack([source, target, source_stride << 32 | target_stride, runs << 32 | size])
