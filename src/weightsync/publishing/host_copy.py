"""Copy of a trainer rank's shards to its host region, with conversion and digests in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from weightsync.arrays import Int8, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, LayoutError
from weightsync.model import Layout, Manifest
from weightsync.tensors.digest import columns_address, digest_rows, row_table
from weightsync.tensors.kernels import digest_table
from weightsync.tensors.memory_views import bytes_at
from weightsync.tensors.shards import Shard, ordered, torch_dtype

Write = Callable[[Iterable[tuple[Shard, torch.Tensor]], Int8], None]
"""Fills the memory of shards; see :meth:`weightsync.tensors.quantization.QuantizedShards.write`."""

_CHUNK_BYTES = 512 << 10  # converted bytes of one chunk, which are still in the cache when they are copied
_NEVER = np.zeros(1, np.int8)


class HostPublisher:
    """Copies the ``shards`` of a trainer rank to a host region at ``address``, laid out by ``layout``, any number of times.

    ``layout`` is :func:`~weightsync.tensors.memory_layout.packed_layout` of the same shards. Shards whose dtype differs from the
    manifest's are converted in chunks of 0.5 MiB. CPU shards are read exactly once, and the digest covers what was read. Shards on
    an accelerator are copied by torch, those on the meta device are written by ``write``, and the digest covers the region.

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
        self._direct, self._converted, self._device = self._sort()

    def place(self, stop: Int8 | None = None, deadline: Deadline | None = None) -> UInt64:
        """Copy the current contents.

        Args:
            stop: Another thread sets ``stop[0]`` to abort the copy.
            deadline: Checked between two shards of an accelerator.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: ``stop`` was set. The region then holds a mixture of versions.
            DeadlineExceeded: ``deadline`` passed.
        """
        flag = _NEVER if stop is None else stop
        out = np.zeros(len(self._shards), np.uint64)
        self._place_device(out, flag, deadline)
        self._place_direct(out, flag)
        for row in self._converted:
            out[row] = self._place_converted(row, flag)
        if flag[0]:
            raise Aborted("the copy of this version was stopped; the published region holds a mixture of versions")
        return out

    def _sort(self) -> tuple[Int64, list[int], list[int]]:
        """Return the rows that are copied unchanged, the rows that are converted, and the rows on an accelerator."""
        direct, converted, device = [], [], []
        for row, shard in enumerate(self._shards):
            if shard.tensor.device.type != "cpu":
                device.append(row)
            elif shard.tensor.dtype == self._dtype(row):
                direct.append(row)
            else:
                converted.append(row)
        return np.array(direct, np.int64), converted, device

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

    def _place_converted(self, row: int, flag: Int8) -> int:
        """Convert one shard chunk by chunk to a small buffer, and copy each chunk to the region while digesting it."""
        shard, dtype = self._shards[row], self._dtype(row)
        dims = max(len(shard.shape), 1)
        source = shard.tensor.reshape(1) if not shard.shape else shard.tensor
        whole = np.array([shard.shape or (1,)], np.int64)
        origin = np.array(shard.box.starts or (0,), np.int64)
        itemsizes = np.array([dtype.itemsize], np.int64)
        target_strides = self._layout.strides[row, -dims:]
        total = 0
        digest = np.zeros(1, np.uint64)
        for index in chunks(tuple(source.shape), max(_CHUNK_BYTES // dtype.itemsize, 1)):
            part = source[index].to(dtype).contiguous()
            first = np.array([cut.start for cut in index], np.int64)
            starts = (origin + first)[None]
            strides = np.array([part.stride()], np.int64) * itemsizes
            table = row_table(
                np.array([part.data_ptr()], np.int64), starts, starts + np.array([part.shape], np.int64), strides, whole, itemsizes
            )
            # A chunk is a run of the shard in C order, so its target is contiguous.
            target = np.array([self._targets[row] + int((first * target_strides).sum())], np.int64)
            arguments = (target.ctypes.data, digest.ctypes.data, columns_address, flag.ctypes.data)
            if digest_table(table.ctypes.data, dims, 0, 1, *arguments) < 1 or flag[0]:
                raise Aborted("the copy of this version was stopped; the published region holds a mixture of versions")
            total += int(digest[0])
        return total % 2**64

    def _place_device(self, out: UInt64, flag: Int8, deadline: Deadline | None) -> None:
        """Copy each accelerator shard to the region, then digest the region. Checks ``flag`` between two shards."""
        for row in self._device:
            if flag[0]:
                return
            if deadline is not None:
                deadline.remaining("copying shards from their device")
            if not self._shards[row].tensor.is_meta:
                self._memory(row).copy_(self._shards[row].tensor)
        if self._write is not None:
            self._write(((self._shards[row], self._memory(row)) for row in self._device if self._shards[row].tensor.is_meta), flag)
        digests = np.zeros(len(self._shards), np.uint64)
        for row in self._device:
            if flag[0]:
                return
            digest_rows(self._manifest, self._layout, (self._address,), row, row + 1, digests)
            out[row] = digests[row]

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


def chunks(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield consecutive runs, in C order, of at most ``most`` elements of a tensor of ``shape``. Each run is a box."""
    inner, dim = 1, len(shape)
    while dim and inner * shape[dim - 1] <= most:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield tuple(slice(0, extent) for extent in shape)
        return
    # Dimensions from ``dim`` on fit whole, the one before is cut into steps, earlier ones are split by index.
    step = max(most // inner, 1)
    rest = tuple(slice(0, extent) for extent in shape[dim:])
    for index in np.ndindex(*shape[: dim - 1]):
        for start in range(0, shape[dim - 1], step):
            lead = tuple(slice(i, i + 1) for i in index)
            yield (*lead, slice(start, min(start + step, shape[dim - 1])), *rest)
