"""All tiles of an engine rank in one launch, from any memory that its GPU can address straight to where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch

from weightsync.tensors.copy_table import Tiles
from weightsync.tensors.cuda.device_copy_table import TILE_BYTES, CopyTable

__all__ = ["LANES", "WARPS", "TileCopy"]

LANES = 1024
"""16-byte lanes of a program's step. Measured: docs/benchmarks/gpu-kernels.md."""

WARPS = 16
"""Warps of a program."""

_NOTHING = nullcontext()


@lru_cache(maxsize=64)
def _warm(device: torch.device, lanes: int, warps: int) -> None:
    """Compile and load the kernel now, by copying 16 bytes, so that the first transfer does not have to."""
    from weightsync.tensors.cuda.kernels import copy_kernel

    scratch = torch.zeros(32, dtype=torch.uint8, device=device)
    address = scratch.data_ptr()
    table = torch.tensor([[address], [address + 16], [0], [1 << 32 | 16]], dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else _NOTHING:
        copy_kernel[(1,)](table, 1, 0, LANES=lanes, num_warps=warps)


class TileCopy:
    """Copies tiles, group by group or all at once, as often as wanted. The table is built and sent to the device once.

    ``groups`` holds for each group the tiles by owner, with the device address of each of that owner's regions as this process
    sees it. Both ends must stay mapped while this object is used, and must not overlap. Used by one thread at a time. Work goes
    to the device's current stream. With ``programs``, never more than that many run at once: slower, but beside other kernels.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Tiles, Sequence[int]]]],
        device: torch.device,
        *,
        lanes: int = LANES,
        warps: int = WARPS,
        tile_bytes: int = TILE_BYTES,
        programs: int = 0,
    ) -> None:
        table = CopyTable.build(groups, tile_bytes=tile_bytes)
        self.device = device
        self.nbytes = table.nbytes
        """Bytes that all groups move."""
        self._first = table.first
        self._tiles = len(table)
        self._lanes, self._warps, self._programs = lanes, warps, programs
        self._table = torch.from_numpy(table.columns).to(device)
        _warm(device, lanes, warps)

    @property
    def table_bytes(self) -> int:
        """Device memory that this object holds."""
        return self._table.nbytes

    def launch(self, start: int = 0, stop: int | None = None) -> None:
        """Begin to copy the groups ``start <= group < stop``: one launch. Returns before the bytes have moved."""
        from weightsync.tensors.cuda.kernels import copy_few_kernel, copy_kernel

        stop = len(self._first) - 1 if stop is None else stop
        first, last = int(self._first[start]), int(self._first[stop])
        if last > first:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else _NOTHING:
                if self._programs:
                    few = (min(self._programs, last - first),)
                    copy_few_kernel[few](self._table, self._tiles, first, last, LANES=self._lanes, num_warps=self._warps)
                else:
                    copy_kernel[(last - first,)](self._table, self._tiles, first, LANES=self._lanes, num_warps=self._warps)
