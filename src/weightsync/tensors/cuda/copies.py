"""Copy of all tiles of an engine rank in one launch, from any memory that its GPU can address directly to the targets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.device_copy_table import TILE_BYTES, DeviceCopyTable
from weightsync.tensors.cuda.waiting import on_device_of

LANES = 1024
"""16-byte lanes in one step of a program. Measured in docs/benchmarks/gpu-kernels.md."""

WARPS = 16
"""Warps of a program."""


@lru_cache(maxsize=64)
def _warm(device: torch.device, lanes: int, warps: int) -> None:
    """Compile and load the kernel by copying 16 bytes, so that the first transfer does not pay for it."""
    from weightsync.tensors.cuda.kernels import copy_kernel

    scratch = torch.zeros(32, dtype=torch.uint8, device=device)
    address = scratch.data_ptr()
    table = torch.tensor([[address], [address + 16], [0], [1 << 32 | 16]], dtype=torch.int64, device=device)
    with on_device_of(table):
        copy_kernel[(1,)](table, 1, 0, LANES=lanes, num_warps=warps)


class TileCopy:
    """Copies tiles, one group or all groups at a time, any number of times. The table is built and sent to the device once.

    Both memories must stay mapped while this object is used, and must not overlap. Not thread-safe. Work goes to the device's
    current stream.

    Args:
        groups: For each group, the tiles by publisher, with the device address of each of that publisher's regions in this process.
        device: The GPU that copies.
        lanes: 16-byte lanes in one step of a program.
        warps: Warps of a program.
        tile_bytes: Most bytes of a tile.
        programs: Most programs that run at the same time, to leave room for other kernels; 0 for no limit.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[CopyTable, Sequence[int]]]],
        device: torch.device,
        *,
        lanes: int = LANES,
        warps: int = WARPS,
        tile_bytes: int = TILE_BYTES,
        programs: int = 0,
    ) -> None:
        table = DeviceCopyTable.build(groups, tile_bytes=tile_bytes)
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
        """Device memory of this object, in bytes."""
        return self._table.nbytes

    def launch(self, start: int = 0, stop: int | None = None) -> None:
        """Start to copy the groups ``start <= group < stop`` in one launch. Returns before the bytes have moved."""
        from weightsync.tensors.cuda.kernels import copy_few_kernel, copy_kernel

        stop = len(self._first) - 1 if stop is None else stop
        first, last = int(self._first[start]), int(self._first[stop])
        if last > first:
            with on_device_of(self._table):
                if self._programs:
                    few = (min(self._programs, last - first),)
                    copy_few_kernel[few](self._table, self._tiles, first, last, LANES=self._lanes, num_warps=self._warps)
                else:
                    copy_kernel[(last - first,)](self._table, self._tiles, first, LANES=self._lanes, num_warps=self._warps)
