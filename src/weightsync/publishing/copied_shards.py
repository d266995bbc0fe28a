"""Copy of a trainer rank's shards to its host region, with conversion and digests in the same pass.

Shards that are converted or on an accelerator are copied many at a time. Where readers reach the GPU's memory, the copy is there,
in the published dtype, filled and digested on the GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from weightsync.arrays import Int8, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides
from weightsync.publishing.listed_changes import DeviceLists
from weightsync.tensors.changes import Sections
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants, columns_address, digest_rows, row_table
from weightsync.tensors.kernels import digest_table
from weightsync.tensors.memory_views import bytes_at
from weightsync.tensors.shards import Shard, ordered, torch_dtype
from weightsync.transports.cuda.region import OwnCudaRegion

_HOST_BYTES = 512 << 10  # of one group, which is still in the cache when it is copied
_DEVICE_BYTES = 32 << 20
_ALIGNMENT = 64  # of rows in a region; a larger gap belongs to other rows

Cut = tuple[slice, ...]


@dataclass
class _RowGroup:
    """Shards, or parts of one, that are gathered together. They are neighbors in the region."""

    target: int
    """Address in the region."""
    nbytes: int
    cuts: list[tuple[int, Cut]]
    """Row and part."""
    offsets: list[int]
    places: list[torch.Tensor]
    """Where they are gathered."""


class GatheredRows:
    """Copies ``rows``, whose shards are on ``device``, to a host region at ``address``, laid out by ``layout``, again and again.

    A group of shards, or of parts of them, is gathered and converted in up to ``group_bytes`` of memory. If the shards are on a
    CUDA device it is there, where they are digested, and they cross in one copy. Otherwise it is in host memory, from where they
    are copied to the region in the pass that digests them.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        layout: Layout,
        address: int,
        rows: Sequence[int],
        device: torch.device,
        group_bytes: int = 0,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._shards, self._dims = shards, manifest.dims
        self._groups = list(
            _grouped(manifest, shards, layout, address, rows, group_bytes or (_DEVICE_BYTES if on_gpu else _HOST_BYTES))
        )
        most = max([group.nbytes for group in self._groups], default=0)
        self._gathered = torch.zeros(most, dtype=torch.uint8, device=device if on_gpu else None)
        for group in self._groups:
            group.places = [
                _place(self._gathered, offset, torch_dtype(manifest[int(layout.tensor[row])].dtype), cut)
                for (row, cut), offset in zip(group.cuts, group.offsets, strict=True)
            ]
        counts = [len(group.cuts) for group in self._groups]
        self._rows, starts, extents = _columns(layout, [cut for group in self._groups for cut in group.cuts])
        for group in self._groups:  # a whole shard is not indexed: that takes 5 µs for each of 18,000
            cuts = zip(group.cuts, group.places, strict=True)
            group.cuts = [(row, () if place.shape == shards[row].box.shape else cut) for (row, cut), place in cuts]
        tensors = layout.tensor[self._rows]
        itemsizes = manifest.itemsizes[tensors]
        strides = packed_strides(extents, itemsizes)
        offsets = np.array([offset for group in self._groups for offset in group.offsets], np.int64)
        self._digest: DeviceDigest | None = None
        if on_gpu:
            which = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            sizes = tuple(group.nbytes for group in self._groups)
            pieces = Layout(manifest, tensors, starts, starts + extents, which, offsets, strides, sizes)
            self._digest = DeviceDigest(manifest, pieces, device)
            self._digest.build([self._gathered.data_ptr()] * len(sizes))
        else:
            self._targets = offsets + np.repeat(np.array([group.target for group in self._groups], np.int64), counts)
            addresses = offsets + self._gathered.data_ptr()
            self._table = row_table(addresses, starts, starts + extents, strides, manifest.shapes[tensors], itemsizes)

    @torch.no_grad()
    def place(self, out: UInt64, flag: Int8, deadline: Deadline | None) -> None:
        """Copy the current contents, and add the digest of each row to ``out[row]``.

        Returns early once ``flag[0]`` is set.

        Raises:
            DeadlineExceeded: ``deadline`` passed.
        """
        first, digests = 0, np.zeros(len(self._rows), np.uint64)
        with nullcontext() if self._digest is None else torch.cuda.device(self._gathered.device):
            try:
                for group in self._groups:
                    if flag[0]:
                        return
                    if deadline is not None:
                        deadline.remaining("copying shards from their device")
                    sources = [self._shards[row].tensor[cut] if cut else self._shards[row].tensor for row, cut in group.cuts]
                    if self._digest is not None:
                        self._gathered.zero_()  # what lies between rows crosses too
                    torch._foreach_copy_(group.places, sources)
                    last = first + len(group.cuts)
                    if self._digest is None:
                        _copy(self._table, self._dims, first, last, self._targets, digests[first:], flag)
                    else:  # each after the other on the device, while the next are asked for here
                        self._digest.launch(first, last)
                        target = torch.from_numpy(bytes_at(group.target, group.nbytes))
                        target.copy_(self._gathered[: group.nbytes], non_blocking=True)
                    first = last
            finally:
                if self._digest is not None:
                    torch.cuda.current_stream().synchronize()
            if self._digest is not None and self._groups:
                digests = self._digest.taken()
        np.add.at(out, self._rows, digests)


def _copy(table: Int64, dims: int, first: int, last: int, targets: Int64, out: UInt64, flag: Int8) -> None:
    """Copy rows ``first <= i < last`` of a row table to ``targets[i]``, with digests to ``out[i - first]``, until ``flag[0]``."""
    addresses = targets.ctypes.data, out.ctypes.data, columns_address, flag.ctypes.data
    digest_table(table.ctypes.data, dims, first, last, *addresses)


def _place(memory: torch.Tensor, offset: int, dtype: torch.dtype, cut: Cut) -> torch.Tensor:
    shape = [part.stop - part.start for part in cut]
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _columns(layout: Layout, cuts: Sequence[tuple[int, Cut]]) -> tuple[Int64, Int64, Int64]:
    """Row, first index and extent in each dimension of parts of rows."""
    rows = np.array([row for row, _ in cuts], np.int64)
    starts, extents = layout.starts[rows].copy(), np.ones((len(cuts), layout.starts.shape[1]), np.int64)
    for index, (_, cut) in enumerate(cuts):
        if cut:
            starts[index, -len(cut) :] += [part.start for part in cut]
            extents[index, -len(cut) :] = [part.stop - part.start for part in cut]
    return rows, starts, extents


def _grouped(
    manifest: Manifest, shards: Sequence[Shard], layout: Layout, address: int, rows: Sequence[int], most: int
) -> Iterator[_RowGroup]:
    """Yield groups of at most about ``most`` bytes, which lie as they will in the region."""
    group = _RowGroup(0, 0, [], [], [])
    for row in rows:
        width, target = int(manifest.itemsizes[layout.tensor[row]]), int(layout.offset[row]) + address
        if (
            group.cuts and (target - group.target) % _ALIGNMENT
        ):  # it began in the middle of a row: nothing after it would be aligned
            yield group
            group = _RowGroup(0, 0, [], [], [])
        for cut in chunks(shards[row].box.shape, max(most // width, 1)):
            size = width * prod(part.stop - part.start for part in cut)
            if not size:
                continue
            offset = target - group.target
            if group.cuts and (offset + size > most or offset - group.nbytes >= _ALIGNMENT):
                yield group
                group = _RowGroup(0, 0, [], [], [])
            if not group.cuts:
                group.target, offset = target, 0
            group.cuts.append((row, cut))
            group.offsets.append(offset)
            group.nbytes = offset + size
            target += size
    if group.cuts:
        yield group


def chunks(shape: tuple[int, ...], most: int) -> Iterator[Cut]:
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


Write = Callable[[Iterable[tuple[Shard, torch.Tensor]], Int8], None]
"""Fills the memory of shards; see :meth:`weightsync.tensors.quantization.QuantizedShards.write`."""

_NEVER = np.zeros(1, np.int8)


class HostPublisher:
    """Copies the ``shards`` of a trainer rank to a host region at ``address``, laid out by ``layout``, any number of times.

    ``layout`` is :func:`~weightsync.tensors.memory_layout.packed_layout` of the same shards. Each is read exactly once, and the
    digest covers what was read, or what it was converted to (:class:`~weightsync.publishing.copied_shards.GatheredRows`). Those on
    the meta device are written by ``write``, and the digest covers the region.
    """

    def __init__(
        self, manifest: Manifest, shards: Iterable[Shard], layout: Layout, address: int, write: Write | None = None
    ) -> None:
        self._manifest, self._layout, self._address, self._write = manifest, layout, address, write
        self._shards = ordered(manifest, shards)
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
        _copy(table, self._manifest.dims, 0, len(rows), targets, digests, flag)
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


PART_BYTES = 1 << 29
"""Converted at a time, where the version before is kept."""


class DeviceCopy:
    """Copies ``shards`` to a region, laid out by ``layout``, and converts them to the dtypes of ``manifest``.

    The shards may be on the device or, offloaded, in host memory. Their bytes are read once, those of the copy written once and
    read once for the digest. Those on the meta device are written by ``write``.

    With ``changes``, a part of the shards at a time is converted to scratch memory and compared there with the region, which holds
    the version before, and takes the words that differ. ``write`` fills all of its shards at once, so with it there is one part.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        layout: Layout,
        region: OwnCudaRegion,
        write: Write | None = None,
        changes: DeviceLists | None = None,
    ) -> None:
        whole = region.memory
        self._device, self._addresses = whole.device, (whole.data_ptr(),)
        self._changes, self._scratch = changes, whole
        firsts = layout.offset
        if changes is not None:
            shards = [shard for shard in shards if shard.box.size]
            self._parts = list(_parts(changes.sections, PART_BYTES if write is None else region.memory.nbytes))
            most = max((span for _, _, _, span in self._parts), default=0)
            self._scratch = changes.scratch.resize_(most)
            starts = np.repeat([start for _, _, start, _ in self._parts], [last - first for first, last, _, _ in self._parts])
            self._places = changes.sections.offset, changes.sections.offset - starts.astype(np.int64)
            firsts = self._places[1]
        self._sources = [shard for shard in shards if not shard.tensor.is_meta]
        self._targets: list[torch.Tensor] = []
        self._write = write
        written = list[tuple[Shard, torch.Tensor]]()
        for shard, first in zip(shards, firsts.tolist(), strict=True):
            dtype = torch_dtype(manifest[manifest.index[shard.name]].dtype)
            place = self._scratch[first : first + shard.box.size * dtype.itemsize]
            target = place.view(dtype).view(shard.box.shape)
            if shard.tensor.is_meta:
                written.append((shard, target))
            else:
                self._targets.append(target)
        self._written = tuple(written)  # the same object each time, so that addresses are looked up once
        self._digest = DeviceDigest(manifest, layout, self._device)
        self._digest.build(self._addresses)

    def place(self, stop: Int8, deadline: Deadline) -> UInt64:
        """Copy the current contents.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: ``stop[0]`` was set before the copy began.
            DeadlineExceeded: ``deadline`` passed.
        """
        if stop[0]:
            raise Aborted("the copy of this version was stopped")
        sources = [shard.tensor for shard in self._sources]
        with torch.no_grad(), torch.cuda.device(self._device):
            if self._write is not None:
                self._write(self._written, stop)
            if self._changes is not None:
                before, now = self._places
                self._changes.start(before + self._addresses[0], now + self._scratch.data_ptr())
                for first, last, _, _ in self._parts:
                    _convert(self._targets[first:last], sources[first:last])
                    self._changes.launch(first, last)
                self._changes.finish(deadline)
            else:
                _convert(self._targets, sources)
        return self.digests(PUBLIC, deadline)

    def digests(self, constants: DigestConstants, deadline: Deadline) -> UInt64:
        """Digest every row of the copy with ``constants``. Raises as :meth:`place` does for the ``deadline``."""
        return self._digest.take(self._addresses, deadline, constants)


def _convert(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _parts(sections: Sections, most: int) -> Iterator[tuple[int, int, int, int]]:
    """First and last of sections that are compared together, where the first begins, and the bytes that they span."""
    first = 0
    ends = sections.offset + sections.nbytes
    while first < len(sections):
        start = int(sections.offset[first])
        last = max(int(np.searchsorted(ends, start + most, side="right")), first + 1)
        yield first, last, start, -(-(int(ends[last - 1]) - start) // 16) * 16
        first = last
