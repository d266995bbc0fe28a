"""Shards of matrices in GPU memory, quantized by a few launches for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.tensors.formats import Format

if TYPE_CHECKING:
    from weightsync.tensors.quantization import Master

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WARPS = 8


class DeviceBatch:
    """Shards on one ``device``, of one ``dtype``, that are published in ``published``, in one format.

    Cells are the blocks that each shard touches, in C order, shard by shard. Work goes to the device's current stream.
    """

    def __init__(self, format_: Format, masters: Sequence[Master], published: torch.dtype, device: torch.device) -> None:
        from weightsync.tensors.cuda.quantize_kernels import TABLE_ROWS, TILE

        self._format, self._masters, self._device = format_, masters, device
        self._dtypes = _DTYPES[masters[0].tensor.dtype], _DTYPES[published]
        boxes = np.array([(*master.box.starts, *master.box.stops) for master in masters], np.int64).T
        grids = np.array([master.grid for master in masters], np.int64).T
        tiles = [-(-boxes[2 + dim] // TILE) - boxes[dim] // TILE for dim in range(2)]
        first_tile = np.cumsum(tiles[0] * tiles[1]) - tiles[0] * tiles[1]
        counts = grids[0] * grids[1]
        owned = np.array([(part.start, part.stop) for master in masters for part in master.owned], np.int64).reshape(-1, 4).T
        owned[1::2] = np.maximum(owned[1::2], owned[::2])
        table = np.zeros((TABLE_ROWS, len(masters)), np.int64)
        table[2], table[3], table[4], table[5] = boxes[0], boxes[2], boxes[1], boxes[3]
        table[6], table[7], table[8], table[9] = first_tile, tiles[1], np.cumsum(counts) - counts, grids[1]
        table[10:12] = np.array([master.first for master in masters], np.int64).T
        table[15], table[16:20] = owned[3] - owned[2], owned
        self._geometry, self.cells = table, int(counts.sum())
        numbers = np.repeat(np.arange(len(masters), dtype=np.int32), tiles[0] * tiles[1])
        self._owners = torch.from_numpy(numbers).to(device)
        self._table, self._aligned = torch.zeros(0), False
        self._placed = np.zeros((TABLE_ROWS, 0), np.int64)

    def maxima(self) -> torch.Tensor:
        """Largest absolute values of the cells, ``float32[cells]``."""
        from weightsync.tensors.cuda.quantize_kernels import maxima_kernel

        maxima = torch.zeros(self.cells, dtype=torch.int32, device=self._device)
        with self._on():
            self._place(())
            rows, columns = self._format.block
            maxima_kernel[(len(self._owners),)](
                self._table, len(self._masters), self._owners, maxima, *self._dtypes, self._aligned, rows, columns, num_warps=_WARPS
            )
        return maxima.view(torch.float32)

    def encode(self, factors: torch.Tensor, scales: torch.Tensor, outs: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Write data (0) and scales (1) of each shard to its memory, with factors and scales of the cells."""
        from weightsync.tensors.cuda.quantize_kernels import encode_kernel

        with self._on():
            self._place(outs)
            rows, columns = self._format.block
            encode_kernel[(len(self._owners),)](
                self._table, len(self._masters), self._owners, factors.float(), scales.view(_WORDS[scales.itemsize]),
                *self._dtypes, self._aligned, rows, columns, self._format.packed, self._format.divides,
                num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    def _place(self, outs: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Bring the table up to date."""
        table = self._geometry.copy()
        table[0] = [master.tensor.data_ptr() for master in self._masters]
        table[1] = [master.tensor.stride(0) for master in self._masters]
        if outs:
            table[12] = [out[0].data_ptr() for out in outs]
            table[13] = [out[0].stride(0) for out in outs]
            table[14] = [out[1].data_ptr() if 1 in out else 0 for out in outs]
            table[16:20, table[14] == 0] = 0
        elif self._placed.size:
            table[12:] = self._placed[12:]  # which maxima do not need: so that the next call finds the table as it is
        if not np.array_equal(table, self._placed):
            self._table, self._placed = torch.from_numpy(table).to(self._device), table
            sizes = self._masters[0].tensor.itemsize, self._format.data_dtype.itemsize
            rows = np.concatenate([table[0], sizes[0] * table[1], table[12], sizes[1] * table[13]])
            self._aligned = not np.any(rows % 16) and not np.any(table[4:6] % 128)

    def _on(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
