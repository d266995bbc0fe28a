"""Copy tables with known results, for the readers of the transport contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from weightsync.arrays import Bytes, Int64, UInt64
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.digest import digest_box
from weightsync.tensors.kernels import BLOCK

_GAP = 0xA5
_MOST_BYTES = 4 << 20  # of a run, so that plain slices can check all tiles


def tiles_from(table: Int64) -> CopyTable:
    """Make tiles from ``int64[n, 7]``: region, source, source stride, target, target stride, rows, row bytes."""
    return CopyTable(table[:, 0].astype(np.int32), *(np.ascontiguousarray(table[:, column]) for column in range(1, 7)))


class Buffer(Protocol):
    """Memory that a reader writes to. The host may be unable to address it."""

    @property
    def address(self) -> int:
        """Start address, as used in tiles."""

    def write(self, data: Bytes) -> None:
        """Replace the contents."""

    def read(self) -> Bytes:
        """Return a copy of the contents."""


class CudaBuffer:
    """Buffer in the current CUDA device's memory."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    @property
    def address(self) -> int:
        """See :class:`Buffer`."""
        return self._memory.data_ptr()

    def write(self, data: Bytes) -> None:
        """See :class:`Buffer`."""
        self._memory.copy_(torch.from_numpy(data))
        torch.cuda.synchronize()

    def read(self) -> Bytes:
        """See :class:`Buffer`."""
        return np.asarray(self._memory.cpu().numpy(), np.uint8)


@dataclass
class Wanted:
    """Groups of tiles from a region of ``nbytes`` into ``target``. Bytes between the tiles must not change.

    With a ``buffer``, tiles refer to that memory, and ``target`` is a copy of it in host memory, made by :meth:`fetch`.
    """

    nbytes: int
    groups: list[CopyTable]
    target: Bytes
    buffer: Buffer | None = None

    @property
    def address(self) -> int:
        """Start address of the target."""
        return int(self.target.ctypes.data) if self.buffer is None else self.buffer.address

    def clear(self) -> None:
        """Fill the target with a pattern that no transfer writes."""
        self.target[:] = _GAP
        if self.buffer is not None:
            self.buffer.write(self.target)

    def fetch(self) -> None:
        """Copy the contents of the buffer to ``target``."""
        if self.buffer is not None:
            self.target[:] = self.buffer.read()

    def expected(self, source: Bytes) -> Bytes:
        """Compute the target after a transfer from ``source``, with plain slices."""
        result, base = np.full(len(self.target), _GAP, np.uint8), self.address
        for tiles in self.groups:
            for start, stride, target, target_stride, rows, size in tiles.table[:, 1:7].tolist():
                for row in range(rows):
                    first = target - base + row * target_stride
                    result[first : first + size] = source[start + row * stride :][:size]
        return result

    def digests(self) -> UInt64:
        """Compute the digests of tiles with keys (:func:`keyed`), ``uint64[tiles]``, from the target, run by run."""
        total, base = [0] * sum(map(len, self.groups)), self.address
        for tiles in self.groups:
            for target, stride, rows, size, row, lead, lead_step, byte, byte_step, blocks in tiles.table[:, 3:].tolist():
                for run in range(rows):
                    first = target - base + run * stride
                    values = torch.from_numpy(self.target[first : first + size].reshape(1, size))
                    shape, starts = (1 << 40, 4 * BLOCK * blocks), (lead + run * lead_step, byte + run * byte_step)
                    total[row] += digest_box(values, shape, starts)
        return np.array([value % 2**64 for value in total], np.uint64)


Allocate = Callable[[int], Buffer]
"""Makes a buffer of the given number of bytes."""


def keyed(wanted: Wanted, seed: int) -> Wanted:
    """Return the same tiles with keys. Each tile has a random position in its own tensor, with runs in one row or in several."""
    random = np.random.default_rng(seed)
    groups, before = [], 0
    for tiles in wanted.groups:
        count = len(tiles)
        beside = random.random(count) < 0.5
        step = np.where(beside, tiles.row_bytes + random.integers(0, 9, count), 0)
        byte = random.integers(0, 3 * BLOCK, count)
        blocks = (byte + tiles.rows * step + tiles.row_bytes) // (4 * BLOCK) + 1
        lead, lead_step = random.integers(0, 1 << 20, count), np.where(beside, 0, random.integers(1, 5, count))
        keys = np.stack([before + np.arange(count), lead, lead_step, byte, step, blocks], axis=1)
        groups.append(replace(tiles, keys=keys.astype(np.int64)))
        before += count
    return replace(wanted, groups=groups)


def odd_shapes(nbytes: int, seed: int, tiles: int = 60, groups: int = 9, allocate: Allocate | None = None) -> Wanted:
    """Make random tiles: single bytes, short strided runs, long runs, overlapping sources, unaligned starts, empty groups."""
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
    buffer = None if allocate is None else allocate(len(target))
    base = int(target.ctypes.data) if buffer is None else buffer.address
    first = base + 3 + np.cumsum(target_extent) - target_extent
    table = np.stack([np.zeros(tiles, np.int64), start, stride, first, target_stride, rows, size], axis=1)
    edges = np.sort(np.concatenate(([0, tiles], random.integers(0, tiles, groups - 1))))
    edges[1] = 0  # the first group is empty
    parts = [tiles_from(table[edges[index] : edges[index + 1]]) for index in range(groups)]
    return Wanted(nbytes, parts, target, buffer)


def big(nbytes: int, groups: int, allocate: Allocate | None = None) -> Wanted:
    """Make tiles over nearly the whole region. Every group has a long run, a tile of wide rows and a tile of narrow rows."""
    share = nbytes // groups
    target = np.zeros(nbytes, np.uint8)
    buffer = None if allocate is None else allocate(nbytes)
    base = int(target.ctypes.data) if buffer is None else buffer.address
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
    return Wanted(nbytes, parts, target, buffer)
