"""Additive digest of every row of a layout in GPU memory, in one launch, bit for bit equal to the CPU's.

The kernel's table has the layout's rows, cut into windows of runs by array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from weightsync.arrays import Int64, UInt64
from weightsync.errors import LayoutError
from weightsync.model.layout import Layout
from weightsync.model.manifest import Manifest
from weightsync.planning.geometry import spread
from weightsync.tensors.copy_table import merge_dimensions
from weightsync.tensors.cuda.device_copy_table import KernelTable
from weightsync.tensors.cuda.waiting import on_device_of
from weightsync.tensors.digest import PUBLIC, DigestConstants, positions

BLOCK_BYTES = 4 * 4096
"""Bytes of a tensor's last dimension that share one factor R (4096 words)."""

QUADS = 256
"""16-byte lanes of a program. A window is at most this wide, so it never crosses a block."""

STEPS = 32
"""Steps of a program. An item has at most ``STEPS * QUADS * 16`` bytes (128 KiB)."""


class DigestTable(KernelTable):
    """Work items of the digest kernel for one layout, ``int64[8, items]``, in the order of its rows, each of which is a group."""

    @classmethod
    def build(
        cls, manifest: Manifest, layout: Layout, bases: Sequence[int], *, quads: int = QUADS, steps: int = STEPS
    ) -> DigestTable:
        """Build the table of ``layout``, whose region ``i`` starts at address ``bases[i]``.

        Raises:
            LayoutError: The number of addresses differs from the number of regions.
        """
        if len(bases) != len(layout.regions):
            raise LayoutError(f"{len(bases)} addresses for a layout of {len(layout.regions)} memory regions")
        window = 16 * quads
        shapes, sizes = manifest.shapes[layout.tensor], manifest.itemsizes[layout.tensor]
        index_strides, _, blocks = positions(shapes, sizes)
        outer = layout.stops - layout.starts
        outer[:, -1] = 1
        # Leading dimensions, merged where memory and global position both continue evenly. Nothing continues steps of -1.
        extents, (strides, steps_each) = merge_dimensions(outer, np.stack([layout.strides, index_strides]), 1, (-1, -1))
        start, stop = layout.starts[:, -1] * sizes, layout.stops[:, -1] * sizes
        element = np.where(stop - start == sizes, sizes, layout.strides[:, -1])
        # Keys are modulo 2^64, so int64 may wrap around.
        leading = (layout.starts * index_strides).sum(axis=1)
        address = np.array([*bases, 0], np.int64)[layout.region] + layout.offset

        # Dimensions that could not be merged: one entry for each index.
        row, part = spread(np.prod(extents[:, 2:], axis=1))
        address, leading = address[row], leading[row]
        for group in range(2, extents.shape[1]):
            index = part % extents[row, group]
            part //= extents[row, group]
            address = address + index * strides[row, group]
            leading = leading + index * steps_each[row, group]

        # Windows of the last dimension, cut at multiples of the window.
        source, part = spread((stop[row] - 1) // window - start[row] // window + 1)
        row, address, leading = row[source], address[source], leading[source]
        index = start[row] // window + part
        begin = index * window
        low, high = np.maximum(start[row] - begin, 0), np.minimum(stop[row] - begin, window)
        address = address + (begin - start[row]) // sizes[row] * element[row]
        key = leading * blocks[row] + begin // BLOCK_BYTES
        key_step = steps_each[row, 1] * blocks[row]
        stride = strides[row, 1]

        # As many runs as fit the steps of a program.
        lanes = -(-high // 16) - low // 16
        most = quads // lanes * steps
        source, part = spread(-(-extents[row, 1] // most))
        before = part * most[source]
        row, begin, low, high = row[source], begin[source], low[source], high[source]
        key, key_step, stride = key[source] + before * key_step[source], key_step[source], stride[source]
        address = address[source] + before * stride
        count = np.minimum(most[source], extents[row, 1] - before)

        element = element[row]
        odd = address | np.where(count > 1, stride, 0) | np.where(element == sizes[row], 0, 1)
        path = np.where((odd | low | high) % 16 == 0, 0, np.where(odd % 4 == 0, 1, 2))
        kind = (begin % BLOCK_BYTES // 4) << 8 | np.log2(sizes[row]).astype(np.int64) << 4 | path
        columns = np.stack([address, stride, element, key, key_step, row << 32 | count, low << 32 | high, kind])
        first = np.searchsorted(row, np.arange(len(layout) + 1)).astype(np.int64)
        return cls(columns, first, layout.nbytes(manifest))


@lru_cache(maxsize=16)
def weights_on(constants: DigestConstants, device: torch.device) -> torch.Tensor:
    """The constants in the memory of ``device``, as kernels read them."""
    return torch.from_numpy(constants.words.view(np.int32).copy()).to(device)


@lru_cache(maxsize=64)
def _warm(device: torch.device, quads: int, warps: int) -> None:
    """Compile and load the kernel by digesting 16 bytes, so that the first version does not pay for it."""
    from weightsync.tensors.cuda.kernels import digest_kernel

    scratch = torch.zeros(2, dtype=torch.int64, device=device)
    table = torch.tensor([[scratch.data_ptr()], [16], [1], [0], [0], [1], [16], [0]], dtype=torch.int64, device=device)
    with on_device_of(table):
        digest_kernel[(1,)](table, 1, 0, weights_on(PUBLIC, device), scratch, QUADS=quads, num_warps=warps)


class LayoutDigest:
    """Digests the rows of one layout in place, any number of times. The table is built and sent to the device once.

    ``bases[i]`` is the address on ``device`` of the layout's region ``i``; the memory must not move. Not thread-safe. Work goes to
    the device's current stream.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        bases: Sequence[int],
        device: torch.device,
        *,
        quads: int = QUADS,
        steps: int = STEPS,
        warps: int = 4,
    ) -> None:
        table = DigestTable.build(manifest, layout, bases, quads=quads, steps=steps)
        self.device = device
        self.nbytes = table.nbytes
        """Bytes that one pass over all rows reads."""
        self._first = table.first
        self._items = len(table)
        self._quads, self._warps = quads, warps
        self._table = torch.from_numpy(table.columns).to(device)
        self._out = torch.zeros(len(layout), dtype=torch.int64, device=device)
        _warm(device, quads, warps)

    @property
    def table_bytes(self) -> int:
        """Device memory of this object, in bytes."""
        return self._table.nbytes + self._out.nbytes

    def launch(self, start: int = 0, stop: int | None = None, constants: DigestConstants = PUBLIC) -> torch.Tensor:
        """Start to digest layout rows ``start <= row < stop`` with ``constants``.

        Returns:
            ``int64[stop - start]`` on the device, with the bits of the unsigned digests. It is a view of this object's buffer,
            which the next launch for these rows overwrites.
        """
        from weightsync.tensors.cuda.kernels import digest_kernel

        stop = len(self._out) if stop is None else stop
        out = self._out[start:stop].zero_()
        first, last = int(self._first[start]), int(self._first[stop])
        if last > first:
            with on_device_of(self._table):
                weights = weights_on(constants, self.device)
                digest_kernel[(last - first,)](
                    self._table, self._items, first, weights, self._out, QUADS=self._quads, num_warps=self._warps
                )
        return out

    def digests(self, start: int = 0, stop: int | None = None, constants: DigestConstants = PUBLIC) -> UInt64:
        """Digest layout rows ``start <= row < stop`` and wait for the device. Returns ``uint64[stop - start]``."""
        values: Int64 = self.launch(start, stop, constants).cpu().numpy()
        return values.view(np.uint64).copy()

    def taken(self) -> UInt64:
        """Digests of the last :meth:`launch` of each row, ``uint64[rows]``. Waits for the current stream."""
        values: Int64 = self._out.cpu().numpy()
        return values.view(np.uint64).copy()
