"""Transport ``nccl``: what ``collective`` is for host memory, between GPUs: one packs, the others unpack to where it belongs.

For memory that a reader cannot map (another host's, expandable segments, shards offloaded to host memory), and for readers that
want the same. Asking, gathering and epochs are those of :mod:`weightsync.transports.broadcast.gloo`; the bytes go as
:mod:`weightsync.transports.broadcast.packed_broadcast` says. NCCL takes each GPU once, so a trainer rank and an engine rank on the
same GPU cannot use it: they have ``cuda_ipc``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransportUnavailable
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network
from weightsync.transports.broadcast.gloo import Collective, dial_owner
from weightsync.transports.broadcast.nccl_receiver import NcclReader
from weightsync.transports.broadcast.nccl_sender import NcclPublisher
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion

__all__ = ["Nccl"]


class Nccl(Collective):
    """The transport ``nccl``; settings as for ``collective``, with buffers in GPU memory (256 MiB each by default).

    Readers and owners use the current CUDA device of the thread that makes them.
    """

    name = "nccl"
    traits = Traits(reads=("host", "cuda"), writes=("cuda",), digests="after", shared_fate=True)

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        if not torch.cuda.is_available():
            return "NCCL needs a CUDA device and a build of torch for it"
        return None if dist.is_available() and dist.is_nccl_available() else "this torch was built without NCCL"

    def publish(self, shelf: PublishedRegion | CudaRegion, key: bytes, here: Host, network: Network = LOOPBACK) -> NcclPublisher:
        """See :class:`weightsync.transports.base.Transport`. A shelf in host memory is read by the current GPU."""
        return NcclPublisher(shelf, key, here, self.traits, self._where(network), self.buffers, self.gather_seconds)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> NcclReader:
        """See :class:`weightsync.transports.base.Transport`."""
        reason = self.unavailable()
        if reason is not None:
            raise TransportUnavailable(reason)
        host, dial = dial_owner(offer, key)
        return NcclReader(dial, deadline, host, self.buffers, torch.device("cuda", torch.cuda.current_device()))
