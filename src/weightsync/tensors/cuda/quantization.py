"""Shards of matrices in GPU memory, quantized by one or two launches for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.tensors.cuda.waiting import on_device_of
from weightsync.tensors.formats import Format

if TYPE_CHECKING:
    from weightsync.tensors.quantization import Master

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WARPS = 4
_TILES = {(128, 128): (128, 128), (0, 0): (128, 128), (1, 0): (2, 2048)}
"""Rows and columns of a tile, by those of a block."""
_TILE_OF_GROUPS = (32, 128)


class DeviceBatch:
    """Shards on one ``device``, of one ``dtype``, that are published in ``published``, in one format.

    Cells are the blocks that each shard touches, in C order, shard by shard. Work goes to the device's current stream.

    Args:
        whole: Only for maxima, of which each shard has one.
    """

    def __init__(
        self, format_: Format, masters: Sequence[Master], published: torch.dtype, device: torch.device, *, whole: bool = False
    ) -> None:
        from weightsync.tensors.cuda.quantize_kernels import TABLE_COLUMNS

        self._format, self._masters, self._device = format_, masters, device
        self._block = (0, 0) if whole else format_.block
        self._dtypes = _DTYPES[masters[0].tensor.dtype], _DTYPES[published]
        tile = _TILES.get(self._block, _TILE_OF_GROUPS)
        boxes = np.array([(*master.box.starts, *master.box.stops) for master in masters], np.int64).T
        grids = np.array([(1, 1) if whole else master.grid for master in masters], np.int64).T
        tiles = [-(-boxes[2 + dim] // size) - boxes[dim] // size for dim, size in enumerate(tile)]
        self._tile = *tile, 1
        if self._block == (1, 0):
            tiles[1][:], self._tile = 1, (*tile, -(-int((boxes[3] - boxes[1]).max()) // tile[1]))
        first_tile = np.cumsum(tiles[0] * tiles[1]) - tiles[0] * tiles[1]
        counts = grids[0] * grids[1]
        owned = np.array([(part.start, part.stop) for master in masters for part in master.owned], np.int64).reshape(-1, 4).T
        owned[1::2] = np.maximum(owned[1::2], owned[::2])
        table = np.zeros((TABLE_COLUMNS, len(masters)), np.int64)
        table[2], table[3], table[4], table[5] = boxes[0], boxes[2], boxes[1], boxes[3]
        table[6], table[7], table[8], table[9] = first_tile, tiles[1], np.cumsum(counts) - counts, grids[1]
        table[10:12] = np.array([master.first for master in masters], np.int64).T
        table[15], table[16:20] = owned[3] - owned[2], owned
        table[21:] = np.array([master.shard.shape for master in masters], np.int64).T
        self._geometry, self._cells = table, int(counts.sum())
        numbers = np.repeat(np.arange(len(masters), dtype=np.int32), tiles[0] * tiles[1])
        self._owners = torch.from_numpy(numbers).to(device)
        self._table, self._aligned = torch.zeros(0), False
        self._native = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)

    def place(self, outs: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Take up where shards are now, and where data (0), scales (1) and what else they publish (2) go, if anywhere."""
        table = self._geometry.copy()
        table[0] = [master.tensor.data_ptr() for master in self._masters]
        table[1] = [master.tensor.stride(0) for master in self._masters]
        if outs:
            table[12] = [out[0].data_ptr() for out in outs]
            table[13] = [out[0].stride(0) for out in outs]
            table[14] = [out[1].data_ptr() if 1 in out else 0 for out in outs]
            table[20] = [out[2].data_ptr() if 2 in out else 0 for out in outs]
            table[16:20, table[14] == 0] = 0
        sizes = self._masters[0].tensor.itemsize, self._format.data_dtype.itemsize
        rows = np.concatenate([table[0], sizes[0] * table[1], table[12], sizes[1] * table[13]])
        self._aligned = not np.any(rows % 16) and not np.any(table[4:6] % 128)
        self._table = torch.from_numpy(np.ascontiguousarray(table.T)).to(self._device)

    def maxima(self) -> torch.Tensor:
        """Largest absolute values of the cells, ``float32[cells]``."""
        maxima = torch.zeros(self._cells, dtype=torch.int32, device=self._device)
        self._launch("maxima", maxima, maxima, maxima, given=False)
        return maxima.view(torch.float32)

    def encode(self, maxima: torch.Tensor | None, wholes: torch.Tensor | None) -> torch.Tensor:
        """Write what the shards publish, with these largest values of cells, ``None`` to compute them along, and of whole matrices.

        Returns:
            The number of the first shard that is not finite, or that of shards.
        """
        bad = torch.full((1,), len(self._masters), dtype=torch.int32, device=self._device)
        given = bad if maxima is None else maxima.view(torch.int32)
        self._launch(self._format.rule, given, bad if wholes is None else wholes, bad, given=maxima is not None)
        return bad

    def _launch(self, rule: str, maxima: torch.Tensor, wholes: torch.Tensor, bad: torch.Tensor, *, given: bool) -> None:
        from weightsync.tensors.cuda.quantize_kernels import quantize_kernel

        with on_device_of(self._table):
            quantize_kernel[(len(self._owners),)](
                self._table, self._owners, maxima, wholes, bad, *self._dtypes, self._aligned, *self._block, *self._tile, given,
                rule, self._format.packed, self._format.inverse, self._native, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
