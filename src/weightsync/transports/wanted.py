"""What the contract's readers ask for: tables of tiles with a known answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.tensors.tiles import Tiles

__all__ = ["Wanted", "big", "odd_shapes", "tiles_from"]

_GAP = 0xA5
_MOST_BYTES = 4 << 20  # of one run of each tile, so that plain slices can check them all


def tiles_from(table: npt.NDArray[np.int64]) -> Tiles:
    """Tiles from ``int64[n, 7]``: region, source, source stride, target, target stride, rows, row bytes."""
    return Tiles(table[:, 0].astype(np.int32), *(np.ascontiguousarray(table[:, column]) for column in range(1, 7)))


@dataclass
class Wanted:
    """Groups of tiles from a shelf of ``nbytes`` into ``target``; bytes between the tiles must stay as they are."""

    nbytes: int
    groups: list[Tiles]
    target: npt.NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Where the target starts."""
        return int(self.target.ctypes.data)

    def expected(self, source: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The target after a transfer, by plain slices."""
        result = np.full(len(self.target), _GAP, np.uint8)
        for tiles in self.groups:
            for start, stride, target, target_stride, rows, size in tiles.table[:, 1:7].tolist():
                for row in range(rows):
                    first = target - self.address + row * target_stride
                    result[first : first + size] = source[start + row * stride :][:size]
        return result


def odd_shapes(nbytes: int, seed: int, tiles: int = 60, groups: int = 9) -> Wanted:
    """Random tiles: single bytes, short strided runs, long runs, overlapping sources, unaligned starts; some groups are empty."""
    random = np.random.default_rng(seed)
    most = max(nbytes // 64, 64)
    size = np.where(random.random(tiles) < 0.3, random.integers(1, 9, tiles), random.integers(1, most, tiles))
    size = np.minimum(size, min(20_000, max(_MOST_BYTES // tiles, 16)))
    rows = np.where(random.random(tiles) < 0.4, random.integers(1, 12, tiles), 1)
    stride = size + random.integers(0, 40, tiles)
    extent = (rows - 1) * stride + size
    start = (random.random(tiles) * (nbytes - extent)).astype(np.int64)
    target_stride = size + random.integers(0, 3, tiles)
    target_extent = (rows - 1) * target_stride + size + random.integers(0, 5, tiles)
    target = np.zeros(int(target_extent.sum()) + 64, np.uint8)
    first = int(target.ctypes.data) + 3 + np.cumsum(target_extent) - target_extent
    table = np.stack([np.zeros(tiles, np.int64), start, stride, first, target_stride, rows, size], axis=1)
    edges = np.sort(np.concatenate(([0, tiles], random.integers(0, tiles, groups - 1))))
    edges[1] = 0  # the first group is empty
    parts = [tiles_from(table[edges[index] : edges[index + 1]]) for index in range(groups)]
    return Wanted(nbytes, parts, target)


def big(nbytes: int, groups: int) -> Wanted:
    """Nearly the whole shelf: runs of megabytes, a tile of wide rows and one of many narrow rows in every group."""
    share = nbytes // groups
    target = np.zeros(nbytes, np.uint8)
    base = int(target.ctypes.data)
    parts = []
    for group in range(groups):
        at, half = group * share, share // 2
        wide, narrow = half // 4 // 64 * 64, 96
        rows = (half - 4096) // 128
        table = [
            [0, at, 0, base + at, 0, 1, half - 4 * wide],
            [0, at + half - 4 * wide, wide, base + at + half - 4 * wide, wide, 4, wide - 32],
            [0, at + half, 128, base + at + half, 128, rows, narrow],
        ]
        if half == 4 * wide:
            del table[0]
        parts.append(tiles_from(np.array(table, np.int64)))
    return Wanted(nbytes, parts, target)
