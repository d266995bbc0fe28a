"""Copy of a trainer rank's shards to its host region, with conversion and digests in the same pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch

from weightsync.arrays import Int8, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, LayoutError
from weightsync.model import Layout, Manifest
from weightsync.publishing.gathered_rows import GatheredRows
from weightsync.tensors.digest import columns_address, digest_rows, row_table
from weightsync.tensors.kernels import digest_table
from weightsync.tensors.memory_views import bytes_at
from weightsync.tensors.shards import Shard, ordered, torch_dtype

Write = Callable[[Iterable[tuple[Shard, torch.Tensor]], Int8], None]
"""Fills the memory of shards; see :meth:`weightsync.tensors.quantization.QuantizedShards.write`."""

_NEVER = np.zeros(1, np.int8)


class HostPublisher:
    """Copies the ``shards`` of a trainer rank to a host region at ``address``, laid out by ``layout``, any number of times.

    ``layout`` is :func:`~weightsync.tensors.memory_layout.packed_layout` of the same shards. Each is read exactly once, and the
    digest covers what was read, or what it was converted to (:class:`~weightsync.publishing.gathered_rows.GatheredRows`). Those on
    the meta device are written by ``write``, and the digest covers the region.

    Raises:
        LayoutError: The shards do not match the layout.
    """

    def __init__(
        self, manifest: Manifest, shards: Iterable[Shard], layout: Layout, address: int, write: Write | None = None
    ) -> None:
        self._manifest, self._layout, self._address, self._write = manifest, layout, address, write
        self._shards = ordered(manifest, shards)
        self._check()
        self._targets: Int64 = layout.offset + address
        self._direct, self._written, others = self._sort()
        self._gathered = [GatheredRows(manifest, self._shards, layout, address, rows, device) for device, rows in others.items()]

    def place(self, stop: Int8 | None = None, deadline: Deadline | None = None) -> UInt64:
        """Copy the current contents.

        Args:
            stop: Another thread sets ``stop[0]`` to abort the copy.
            deadline: Checked between two groups of converted shards, or of an accelerator's.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: ``stop`` was set. The region then holds a mixture of versions.
            DeadlineExceeded: ``deadline`` passed.
        """
        flag = _NEVER if stop is None else stop
        out = np.zeros(len(self._shards), np.uint64)
        for rows in self._gathered:
            rows.place(out, flag, deadline)
        self._place_written(out, flag)
        self._place_direct(out, flag)
        if flag[0]:
            raise Aborted("the copy of this version was stopped; the published region holds a mixture of versions")
        return out

    def _sort(self) -> tuple[Int64, list[int], dict[torch.device, list[int]]]:
        """Return the rows that are copied unchanged, those that ``write`` fills, and the others by the device of their shards."""
        direct, written, others = list[int](), list[int](), defaultdict[torch.device, list[int]](list)
        for row, shard in enumerate(self._shards):
            if shard.tensor.is_meta:
                written.append(row)
            elif shard.tensor.device.type == "cpu" and shard.tensor.dtype == self._dtype(row):
                direct.append(row)
            else:
                others[shard.tensor.device].append(row)
        return np.array(direct, np.int64), written, others

    def _dtype(self, row: int) -> torch.dtype:
        return torch_dtype(self._manifest[int(self._layout.tensor[row])].dtype)

    def _place_direct(self, out: UInt64, flag: Int8) -> None:
        rows = self._direct
        if not len(rows):
            return
        # Read the addresses each time, because a storage may have moved. The maker of the shards must detect changed views.
        addresses = np.array([self._shards[row].tensor.data_ptr() for row in rows], np.int64)
        strides = np.zeros((len(rows), self._manifest.dims), np.int64)
        for index, row in enumerate(rows):
            tensor = self._shards[row].tensor
            if tensor.dim():
                strides[index, -tensor.dim() :] = tensor.stride()
        layout, tensors = self._layout, self._layout.tensor[rows]
        itemsizes = self._manifest.itemsizes[tensors]
        strides *= itemsizes[:, None]
        table = row_table(addresses, layout.starts[rows], layout.stops[rows], strides, self._manifest.shapes[tensors], itemsizes)
        targets = np.ascontiguousarray(self._targets[rows])
        digests = np.zeros(len(rows), np.uint64)
        finished = digest_table(
            table.ctypes.data,
            self._manifest.dims,
            0,
            len(rows),
            targets.ctypes.data,
            digests.ctypes.data,
            columns_address,
            flag.ctypes.data,
        )
        if finished < len(rows):
            raise Aborted("the copy of this version was stopped; the published region holds a mixture of versions")
        out[rows] = digests

    def _place_written(self, out: UInt64, flag: Int8) -> None:
        """Let ``write`` fill its rows, then digest them."""
        if self._write is None or not self._written:
            return
        self._write(((self._shards[row], self._memory(row)) for row in self._written), flag)
        for row in self._written:
            if flag[0]:
                return
            digest_rows(self._manifest, self._layout, (self._address,), row, row + 1, out)

    def _memory(self, row: int) -> torch.Tensor:
        """The memory of a row in the region."""
        shape = self._shards[row].box.shape
        size = self._shards[row].box.size * self._dtype(row).itemsize
        return torch.from_numpy(bytes_at(int(self._targets[row]), size)).view(self._dtype(row)).view(shape)

    def _check(self) -> None:
        layout, manifest = self._layout, self._manifest
        if len(layout) != len(self._shards) or len(layout.regions) != 1:
            raise LayoutError(
                f"{len(self._shards)} shards do not fit a layout of {len(layout)} rows, {len(layout.regions)} regions"
            )
        for row, shard in enumerate(self._shards):
            if manifest[int(layout.tensor[row])].name != shard.name or layout.box(row, manifest) != shard.box:
                raise LayoutError(f"row {row} of the layout is not the shard of {shard.name} at {list(shard.box.starts)}")
        if not layout.contiguous(manifest):
            raise LayoutError("the rows of a published region must be contiguous")
