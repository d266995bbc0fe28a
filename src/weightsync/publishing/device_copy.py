"""A copy of a trainer rank's shards on its GPU, in the published dtype, filled and digested there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.model import Layout, Manifest
from weightsync.publishing.host_copy import Write
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.transports.cuda.region import PLACING_SECONDS, OwnCudaRegion

_LEFT_BYTES = 1 << 30  # of a device's memory: for the trainer


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
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[Shard], layout: Layout, region: OwnCudaRegion, write: Write | None = None
    ) -> None:
        whole = region.memory
        self._device, self._addresses = whole.device, (whole.data_ptr(),)
        self._sources = [shard.tensor for shard in shards if not shard.tensor.is_meta]
        self._targets: list[torch.Tensor] = []
        self._write, self._written = write, list[tuple[Shard, torch.Tensor]]()
        for row, shard in enumerate(shards):
            dtype = torch_dtype(manifest[int(layout.tensor[row])].dtype)
            first = int(layout.offset[row])
            target = whole[first : first + shard.box.size * dtype.itemsize].view(dtype).view(shard.box.shape)
            if shard.tensor.is_meta:
                self._written.append((shard, target))
            else:
                self._targets.append(target)
        self._digest = DeviceDigest(manifest, layout, self._device)
        self._digest.build(self._addresses)

    def place(self, stop: npt.NDArray[np.int8], deadline: Deadline | None = None) -> npt.NDArray[np.uint64]:
        """Copy the current contents.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: ``stop[0]`` was set before the copy began.
            DeadlineExceeded: ``deadline`` passed.
        """
        if stop[0]:
            raise Aborted("the copy of this version was stopped")
        with torch.no_grad(), torch.cuda.device(self._device):
            if self._targets:
                torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
            if self._write is not None:
                self._write(self._written, stop)
        return self.digests(PUBLIC, deadline or Deadline(PLACING_SECONDS))

    def digests(self, constants: DigestConstants, deadline: Deadline) -> npt.NDArray[np.uint64]:
        """Digest every row of the copy with ``constants``. Raises as :meth:`place` does for the ``deadline``."""
        return self._digest.take(self._addresses, deadline, constants)
