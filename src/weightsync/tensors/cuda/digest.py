"""Additive digest of every row of a layout in GPU memory, in one launch, bit for bit equal to the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import torch

from weightsync.arrays import Int64, UInt64
from weightsync.model.layout import Layout
from weightsync.model.manifest import Manifest
from weightsync.tensors.cuda.digest_table import QUADS, STEPS, DigestTable
from weightsync.tensors.digest import PUBLIC, DigestConstants

_NOTHING = nullcontext()


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
    with torch.cuda.device(device) if device.type == "cuda" else _NOTHING:
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
            with torch.cuda.device(self.device) if self.device.type == "cuda" else _NOTHING:
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
