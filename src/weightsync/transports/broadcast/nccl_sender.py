"""The sender's end of transport ``nccl``: GPU memory in place, or a shelf in host memory that its GPU can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.group import BroadcastGroup
from weightsync.transports.broadcast.packed_broadcast import DEFAULT_BUFFER, PackedBroadcast, packed_frames
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous, init_custom_process_group
from weightsync.transports.broadcast.sender import SendingWire
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.pinning import Pinned
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.requests import Ready

__all__ = ["NcclSending", "name_of_gpu"]

Int64 = npt.NDArray[np.int64]


def name_of_gpu(device: torch.device) -> str:
    """What no other GPU is called, on any host."""
    return str(torch.cuda.get_device_properties(device).uuid)


class NcclSending(SendingWire):
    """From a GPU's memory in place, or a region of host memory that its GPU can read; through buffers of the GPU's."""

    def __init__(self, region: PublishedRegion | CudaRegion, buffers: BufferSettings) -> None:
        self._region, self._buffers = region, buffers
        self._pinned: Pinned | None = None
        if isinstance(region, CudaRegion):
            self._device = torch.device("cuda", region.device)
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._pinned = Pinned(region.payload, self._device)
        self.memory = self._pinned

    @property
    def regions(self) -> Sequence[int]:
        """See :class:`SendingWire`."""
        if isinstance(self._region, CudaRegion):
            return self._region.addresses
        return () if self._pinned is None else (self._pinned.address,)

    @cached_property
    def buffer_bytes(self) -> int:
        """See :class:`SendingWire`."""
        return self._buffers.bytes_each(torch.cuda.mem_get_info(self._device)[0], DEFAULT_BUFFER)

    def cut(self, counts: Int64, sizes: Int64) -> Int64:
        """See :class:`SendingWire`."""
        return packed_frames(counts, sizes, self.buffer_bytes)

    def open(self, address: str, readers: int, deadline: Deadline) -> BroadcastGroup:
        """See :class:`SendingWire`."""
        return _DeviceBroadcastGroup(address, readers, self.buffer_bytes, self._buffers.num_buffers, self._device, deadline)

    def ready(self) -> Ready:
        """See :class:`SendingWire`: names the GPU, which no reader may use."""
        return Ready(name_of_gpu(self._device))

    def close(self) -> None:
        """See :class:`SendingWire`."""
        super().close()
        if self._pinned is not None:
            self._pinned.close()


class _DeviceBroadcastGroup(BroadcastGroup):
    """Over NCCL."""

    def __init__(
        self, address: str, readers: int, buffer_bytes: int, num_buffers: int, device: torch.device, deadline: Deadline
    ) -> None:
        super().__init__(address, readers, deadline)
        self._buffer_bytes, self._num_buffers, self._device = buffer_bytes, num_buffers, device
        self._made_for: tuple[int, ...] = ()
        self._end: PackedBroadcast | None = None

    def _enter(self, rendezvous: StoreRendezvous, deadline: Deadline) -> ProcessGroup:
        return init_custom_process_group(
            "nccl", 0, self._size, self.name, deadline, rendezvous=rendezvous, device=self._device, priority=True
        )

    def send(
        self,
        tiles: CopyTable,
        frames: Int64,
        regions: Sequence[int],
        version: int,
        check: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """See :meth:`BroadcastGroup.send`."""
        self._made(tiles, frames, regions).run(self.joined(), version, deadline, check=check)

    def warm_up(self, tiles: CopyTable, frames: Int64, regions: Sequence[int], deadline: Deadline) -> None:
        """See :meth:`BroadcastGroup.warm_up`: make buffers and tables, and connect the communicator by a first broadcast."""
        self._made(tiles, frames, regions)
        self.joined().broadcast([torch.zeros(1, dtype=torch.uint8, device=self._device)], deadline)

    def _made(self, tiles: CopyTable, frames: Int64, regions: Sequence[int]) -> PackedBroadcast:
        """The one in hand, unless the trainer's memory moved; what is wanted stays the same."""
        if self._end is None or tuple(regions) != self._made_for:
            self._end = None  # two would not fit
            self._end = PackedBroadcast(tiles, frames, self._device, self._buffer_bytes, self._num_buffers, regions)
            self._made_for = tuple(regions)
        return self._end
