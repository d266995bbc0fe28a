"""Copies, to a host region, of shards that are converted or on an accelerator: many at a time, digested as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from weightsync.arrays import Int8, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.model import Layout, Manifest
from weightsync.tensors.digest import columns_address, row_table
from weightsync.tensors.kernels import digest_table
from weightsync.tensors.shards import Shard, torch_dtype

_HOST_BYTES = 512 << 10  # of one group, which is still in the cache when it is copied
_DEVICE_BYTES = 32 << 20
_ALIGNMENT = 64
_TWO = 2

Cut = tuple[slice, ...]
Cuts = list[tuple[int, Cut]]
"""Rows and parts of them."""


@dataclass(frozen=True)
class _Group:
    """Shards, or parts of one, that are gathered together."""

    which: int
    """Of the two pieces of memory."""
    nbytes: int
    first: int
    """Of its rows in the table."""
    cuts: Cuts
    places: list[torch.Tensor]
    """Where they are gathered."""


class GatheredRows:
    """Copies ``rows``, whose shards are on ``device``, to a host region at ``address``, laid out by ``layout``, again and again.

    A group of shards, or of parts of them, is gathered and converted on the device. From an accelerator it crosses to pinned memory
    in one copy, while the group before is copied to the region and digested in one pass. It takes twice ``group_bytes`` of memory
    on the device, and on the host too if that is another one; less for few shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        layout: Layout,
        address: int,
        rows: Sequence[int],
        device: torch.device,
        group_bytes: int | None = None,
    ) -> None:
        self._shards, self._dims, self._cuda = shards, manifest.dims, device.type == "cuda"
        most = group_bytes or (_HOST_BYTES if device.type == "cpu" else _DEVICE_BYTES)
        groups = list(_grouped(manifest, shards, layout, rows, most))
        sizes = [max([end for _, _, end in groups[which::_TWO]], default=0) for which in range(_TWO)]
        self._gathered = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._here = self._gathered
        if device.type != "cpu":
            self._here = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for size in sizes]
        self._groups, first = list[_Group](), 0
        for index, (cuts, offsets, end) in enumerate(groups):
            places = [
                _place(self._gathered[index % _TWO], offset, torch_dtype(manifest[int(layout.tensor[row])].dtype), cut)
                for (row, cut), offset in zip(cuts, offsets, strict=True)
            ]
            self._groups.append(_Group(index % _TWO, end, first, cuts, places))
            first += len(cuts)
        self._index(manifest, layout, address, groups)

    def _index(self, manifest: Manifest, layout: Layout, address: int, groups: list[tuple[Cuts, list[int], int]]) -> None:
        """Build the table of all groups, which the kernel copies from."""
        cuts = [cut for group in groups for cut in group[0]]
        self._rows = rows = np.array([row for row, _ in cuts], np.int64)
        here = np.array([self._here[index % _TWO].data_ptr() for index in range(len(groups))], np.int64)
        offsets = np.array([offset for group in groups for offset in group[1]], np.int64)
        firsts = np.zeros((len(cuts), self._dims), np.int64)
        extents = np.ones_like(firsts)
        for index, (_, cut) in enumerate(cuts):
            if cut:
                firsts[index, -len(cut) :] = [part.start for part in cut]
                extents[index, -len(cut) :] = [part.stop - part.start for part in cut]
        tensors = layout.tensor[rows]
        itemsizes, starts = manifest.itemsizes[tensors], layout.starts[rows] + firsts
        self._targets = layout.offset[rows] + (firsts * layout.strides[rows]).sum(axis=1) + address
        steps = np.concatenate([np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1], np.ones((len(cuts), 1), np.int64)], axis=1)
        addresses = np.repeat(here, [len(group[0]) for group in groups]) + offsets
        shapes = manifest.shapes[tensors]
        self._table = row_table(addresses, starts, starts + extents, steps * itemsizes[:, None], shapes, itemsizes)

    def place(self, out: UInt64, flag: Int8, deadline: Deadline | None) -> None:
        """Copy the current contents, and add the digest of each row to ``out[row]``.

        Raises:
            Aborted: ``flag[0]`` was set while a group was copied. Between two groups this returns early.
            DeadlineExceeded: ``deadline`` passed.
        """
        before: tuple[_Group, torch.cuda.Event] | None = None
        for group in self._groups:
            if flag[0]:
                return
            if deadline is not None:
                deadline.remaining("copying shards from their device")
            arrives = self._fetch(group)
            if before is not None:
                self._take(before[0], before[1], out, flag)
            before = None if arrives is None else (group, arrives)
            if arrives is None:
                self._take(group, None, out, flag)
        if before is not None:
            self._take(before[0], before[1], out, flag)

    @torch.no_grad()
    def _fetch(self, group: _Group) -> torch.cuda.Event | None:
        """Bring a group here. Returns what tells when it has arrived, if that is later."""
        parts = [self._shards[row].tensor[cut] if cut else self._shards[row].tensor for row, cut in group.cuts]
        gathered, here = self._gathered[group.which], self._here[group.which]
        if not self._cuda:
            torch._foreach_copy_(group.places, parts)
            if here is not gathered:
                here[: group.nbytes].copy_(gathered[: group.nbytes])
            return None
        with torch.cuda.device(gathered.device):
            torch._foreach_copy_(group.places, parts, non_blocking=True)
            here[: group.nbytes].copy_(gathered[: group.nbytes], non_blocking=True)
            arrives = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrives.record()
            return arrives

    def _take(self, group: _Group, arrives: torch.cuda.Event | None, out: UInt64, flag: Int8) -> None:
        if arrives is not None:
            arrives.synchronize()
        first, last = group.first, group.first + len(group.cuts)
        digests = np.zeros(last - first, np.uint64)
        finished = digest_table(
            self._table.ctypes.data, self._dims, first, last, self._targets.ctypes.data, digests.ctypes.data, columns_address,
            flag.ctypes.data,
        )  # fmt: skip
        if finished < len(digests):
            raise Aborted("the copy of this version was stopped; the published region holds a mixture of versions")
        np.add.at(out, self._rows[first:last], digests)


def _place(memory: torch.Tensor, offset: int, dtype: torch.dtype, cut: Cut) -> torch.Tensor:
    shape = [part.stop - part.start for part in cut]
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _grouped(
    manifest: Manifest, shards: Sequence[Shard], layout: Layout, rows: Sequence[int], most: int
) -> Iterator[tuple[Cuts, list[int], int]]:
    """Yield groups of rows or parts of one, of at most about ``most`` bytes: what they hold, where it lies, and where it ends."""
    cuts, offsets, end = Cuts(), list[int](), 0
    for row in rows:
        width = int(manifest.itemsizes[layout.tensor[row]])
        for cut in chunks(shards[row].box.shape, max(most // width, 1)):
            size = width * prod(part.stop - part.start for part in cut)
            if cuts and end + size > most:
                yield cuts, offsets, end
                cuts, offsets, end = [], [], 0
            cuts.append((row, cut))
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    if cuts:
        yield cuts, offsets, end


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
