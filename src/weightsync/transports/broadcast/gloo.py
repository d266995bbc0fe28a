"""Transport ``collective``: broadcasts from host memory to host memory, along gloo's tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransportUnavailable
from weightsync.protocol.messages import Traits
from weightsync.transports.base import Reader
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.group import BroadcastGroup, HostBroadcastGroup
from weightsync.transports.broadcast.receiver import CollectiveReader, host_frames
from weightsync.transports.broadcast.sender import SendingWire
from weightsync.transports.broadcast.transport import Broadcast
from weightsync.transports.host.memory import available_bytes
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.connected_reader import Dial

__all__ = ["Collective"]

_DEFAULT_BUFFER = 16 << 20


class _Sending(SendingWire):
    """From a region of the host's memory, through buffers of the host's."""

    def __init__(self, region: PublishedRegion, buffers: BufferSettings) -> None:
        self._address, self.memory, self._buffers = region.address, region.payload, buffers

    @property
    def regions(self) -> Sequence[int]:
        return (self._address,)

    @cached_property
    def buffer_bytes(self) -> int:
        return self._buffers.bytes_each(available_bytes() or 0, _DEFAULT_BUFFER)

    def cut(self, counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return host_frames(counts, sizes, self.buffer_bytes)

    def open(self, address: str, readers: int, deadline: Deadline) -> BroadcastGroup:
        return HostBroadcastGroup(address, readers, self.buffer_bytes, self._buffers.num_buffers, deadline)


class Collective(Broadcast):
    """The transport ``collective``: host memory, over gloo. Buffers have 16 MiB each by default."""

    name = "collective"
    traits = Traits(shared_fate=True)

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        return None if dist.is_available() and dist.is_gloo_available() else "this torch was built without gloo"

    def sending(self, region: object) -> SendingWire:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`."""
        if not isinstance(region, PublishedRegion):
            raise TransportUnavailable("'collective' sends from host memory, and this region lies on a GPU: use 'nccl'")
        return _Sending(region, self.buffers)

    def receiving(self, dial: Dial, deadline: Deadline, host: str) -> Reader:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`."""
        return CollectiveReader(dial, deadline, host, self.buffers)
