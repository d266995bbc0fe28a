"""Transport ``nccl``: what ``collective`` is for host memory, between GPUs: one packs, the others unpack to where it belongs.

For memory that a reader cannot map (another host's, expandable segments, shards offloaded to host memory), and for readers that
want the same. Asking, gathering and epochs are those of every broadcast (:mod:`weightsync.transports.broadcast.transport`); the
bytes go as :mod:`weightsync.transports.broadcast.packed_broadcast` says. NCCL takes each GPU once, so a trainer rank and an
engine rank on the same GPU cannot use it: they have ``cuda_ipc``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransportUnavailable
from weightsync.protocol.messages import Traits
from weightsync.transports.base import Reader
from weightsync.transports.broadcast.nccl_receiver import NcclReader
from weightsync.transports.broadcast.nccl_sender import NcclSending
from weightsync.transports.broadcast.sender import SendingWire
from weightsync.transports.broadcast.transport import Broadcast
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.connected_reader import Dial

__all__ = ["Nccl"]


class Nccl(Broadcast):
    """The transport ``nccl``: to GPUs, over NCCL. Buffers are in GPU memory and have 256 MiB each by default.

    Readers and publishers use the current CUDA device of the thread that makes them.
    """

    name = "nccl"
    traits = Traits(reads=("host", "cuda"), writes=("cuda",), digests="after", shared_fate=True)

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        if not torch.cuda.is_available():
            return "NCCL needs a CUDA device and a build of torch for it"
        return None if dist.is_available() and dist.is_nccl_available() else "this torch was built without NCCL"

    def sending(self, region: PublishedRegion | CudaRegion) -> SendingWire:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`. The current GPU reads a region of host memory."""
        return NcclSending(region, self.buffers)

    def receiving(self, dial: Dial, deadline: Deadline, host: str) -> Reader:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`."""
        reason = self.unavailable()
        if reason is not None:
            raise TransportUnavailable(reason)
        return NcclReader(dial, deadline, host, self.buffers, torch.device("cuda", torch.cuda.current_device()))
