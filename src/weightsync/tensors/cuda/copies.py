"""All tiles of an engine rank in one launch, from any memory that its GPU can address straight to where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from weightsync.tensors.cuda.copy_table import TILE_BYTES, CopyTable
from weightsync.tensors.tiles import Tiles

__all__ = ["TileCopy"]

_NOTHING = nullcontext()


class TileCopy:
    """Copies tiles, group by group or all at once, as often as wanted. The table is built and sent to the device once.

    ``groups`` holds for each group the tiles by owner, with the device address of each of that owner's regions as this process
    sees it. Both ends must stay mapped while this object is used, and must not overlap. Used by one thread at a time. Work goes
    to the device's current stream.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Tiles, Sequence[int]]]],
        device: torch.device,
        *,
        shuffle: int | None = None,
        lanes: int = 512,
        warps: int = 16,
        tile_bytes: int = TILE_BYTES,
    ) -> None:
        table = CopyTable.build(groups, shuffle=shuffle, tile_bytes=tile_bytes)
        self.device = device
        self.nbytes = table.nbytes
        """Bytes that all groups move."""
        self._first = table.first
        self._tiles = len(table)
        self._lanes, self._warps = lanes, warps
        self._table = torch.from_numpy(table.columns).to(device)

    @property
    def table_bytes(self) -> int:
        """Device memory that this object holds."""
        return self._table.nbytes

    def launch(self, start: int = 0, stop: int | None = None) -> None:
        """Begin to copy the groups ``start <= group < stop``: one launch. Returns before the bytes have moved."""
        from weightsync.tensors.cuda.kernels import copy_kernel

        stop = len(self._first) - 1 if stop is None else stop
        first, last = int(self._first[start]), int(self._first[stop])
        if last > first:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else _NOTHING:
                copy_kernel[(last - first,)](self._table, self._tiles, first, LANES=self._lanes, num_warps=self._warps)
