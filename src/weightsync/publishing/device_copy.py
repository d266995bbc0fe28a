"""A copy of a trainer rank's shards on its GPU, in the published dtype, filled and digested there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from weightsync.arrays import Int8, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.model import Layout, Manifest
from weightsync.publishing.host_copy import Write
from weightsync.publishing.listed_changes import DeviceLists
from weightsync.tensors.changes import Sections
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.transports.cuda.region import PLACING_SECONDS, OwnCudaRegion

_LEFT_BYTES = 1 << 30  # of a device's memory: for the trainer
PART_BYTES = 1 << 29  # converted at a time, where the version before is kept


def room_for_copy(nbytes: int, device: torch.device) -> str | None:
    """Why ``device`` has no room for a copy of ``nbytes``, or ``None`` if it has."""
    free, _ = torch.cuda.mem_get_info(device)
    if free >= nbytes + _LEFT_BYTES:
        return None
    return f"{device} has {free:,} bytes free, and a copy of this rank's shards takes {nbytes:,} and leaves {_LEFT_BYTES:,}"


class DeviceCopy:
    """Copies ``shards`` to a region, laid out by ``layout``, and converts them to the dtypes of ``manifest``.

    The shards may be on the device or, offloaded, in host memory. Their bytes are read once, those of the copy written once and
    read once for the digest. Those on the meta device are written by ``write``.

    With ``changes``, and without ``write``, a part of the shards at a time is converted to scratch memory and compared there with
    the region, which holds the version before, and takes the words that differ.
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
            self._parts = list(_parts(changes.sections))
            most = max((span for _, _, _, span in self._parts), default=0)
            self._scratch = torch.empty(most, dtype=torch.uint8, device=self._device)
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

    def place(self, stop: Int8, deadline: Deadline | None = None) -> UInt64:
        """Copy the current contents.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: ``stop[0]`` was set before the copy began.
            DeadlineExceeded: ``deadline`` passed.
        """
        if stop[0]:
            raise Aborted("the copy of this version was stopped")
        deadline = deadline or Deadline(PLACING_SECONDS)
        sources = [shard.tensor for shard in self._sources]
        with torch.no_grad(), torch.cuda.device(self._device):
            if self._changes is not None:
                before, now = self._places
                self._changes.start(before + self._addresses[0], now + self._scratch.data_ptr())
                for first, last, _, _ in self._parts:
                    torch._foreach_copy_(self._targets[first:last], sources[first:last], non_blocking=True)
                    self._changes.launch(first, last)
                self._changes.finish(deadline)
            elif self._targets:
                torch._foreach_copy_(self._targets, sources, non_blocking=True)
            if self._write is not None:
                self._write(self._written, stop)
        return self.digests(PUBLIC, deadline)

    def digests(self, constants: DigestConstants, deadline: Deadline) -> UInt64:
        """Digest every row of the copy with ``constants``. Raises as :meth:`place` does for the ``deadline``."""
        return self._digest.take(self._addresses, deadline, constants)


def _parts(sections: Sections) -> Iterator[tuple[int, int, int, int]]:
    """First and last of sections that are compared together, where the first begins, and the bytes that they span."""
    first = 0
    ends = sections.offset + sections.nbytes
    while first < len(sections):
        start = int(sections.offset[first])
        last = max(int(np.searchsorted(ends, start + PART_BYTES, side="right")), first + 1)
        yield first, last, start, -(-(int(ends[last - 1]) - start) // 16) * 16
        first = last
