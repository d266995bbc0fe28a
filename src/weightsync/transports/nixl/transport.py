"""Transport ``nixl``: readers pull memory of the publisher's host or GPU by one-sided reads, over RDMA, NVLink or shared memory.

Reader and publisher meet at an authenticated connection, like that of ``tcp``, over which the publisher describes its memory. A
read then needs no thread of the publisher. Long runs are read directly to where they belong. What is cut too finely for that goes
in frames that the publisher packs (:mod:`weightsync.transports.nixl.staged_frames`). The shortest run that is read directly is
measured when a plan is prepared.

A one-sided read tears silently if the memory changes meanwhile. The region's header page, a sequence lock, is therefore read before
and after, and the engine compares the digest of what arrived.

NIXL encrypts nothing, and UCX opens ports of its own: name the interface (``devices``) and keep the network to yourself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.dialer import dialer
from weightsync.transports.net.publisher_address import PublisherAddress, reaches
from weightsync.transports.nixl.agent import Agent, network_devices, nixl_problem, rdma_devices
from weightsync.transports.nixl.publisher import NixlPublisher
from weightsync.transports.nixl.reader import POSTING_THREADS, NixlReader
from weightsync.transports.nixl.staged_frames import MOST_BUFFER_BYTES

__all__ = ["Nixl"]

_sharing = threading.Lock()
_POSTING = {"num_threads": str(POSTING_THREADS), "split_batch_size": "64"}
"""Parameters of a reader's agent: many pieces are posted by several threads, as posting one takes as long as copying megabytes."""


class Nixl(Transport):
    """The transport ``nixl``.

    Args:
        bind: Address on which publishers describe their memory to readers; by default where the trainer's
            :class:`~weightsync.transports.base.Network` says, or loopback.
        devices: UCX devices that carry the bytes, such as ``"mlx5_0:1,mlx5_1:1"`` or ``"eth0"``; by default UCX chooses.
        rails: Devices over which one large read is spread (``MAX_RMA_RAILS``); by default NIXL's two.
        buffer_bytes: Size of each of two staging buffers at both ends, for what is packed; by default 16 MiB in host memory and
            256 MiB in a GPU's. At least 8 MiB, at most 512.
        options: More parameters of NIXL's backend UCX, passed through. UCX also reads its own environment variables.

    Raises:
        ConfigurationError: ``buffer_bytes`` is too large.
    """

    name = "nixl"
    traits = Traits(reads=("host", "cuda"), writes=("host", "cuda"), digests="after", live_source=True)

    def __init__(
        self,
        bind: str | None = None,
        devices: str | None = None,
        rails: int | None = None,
        buffer_bytes: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if buffer_bytes is not None and buffer_bytes > MOST_BUFFER_BYTES:
            raise ConfigurationError(f"buffer_bytes is {MOST_BUFFER_BYTES:,} at most, not {buffer_bytes:,}")
        self._bind, self._buffer_bytes = bind, buffer_bytes
        self.options = dict(options or {})
        self._devices = tuple(name.partition(":")[0] for name in devices.split(",")) if devices is not None else ()
        if devices is not None:
            self.options["ucx_devices"] = devices
        if rails is not None:
            self.options["engine_config"] = f"MAX_RMA_RAILS={rails}"
        self._agent: Agent | None = None
        self._readers = 0

    def automatic(self) -> bool:
        """See :class:`weightsync.transports.base.Transport`: only where an RDMA device has a link."""
        return bool(rdma_devices())

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        missing = [name for name in self._devices if name not in network_devices()]
        if missing:
            return f"this machine has no network device {', '.join(missing)}; it has {', '.join(network_devices())}"
        return nixl_problem()

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return reaches(offer, local_host)

    def publish(
        self, region: PublishedRegion | CudaRegion, key: bytes, local_host: Host, network: Network = LOOPBACK
    ) -> NixlPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return NixlPublisher(self, self.options, region, key, local_host, self._bind or network.address, self._buffer_bytes)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> NixlReader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, publisher_id, _ = PublisherAddress.parse(offer.address)
        return NixlReader(dialer(host, port, publisher_id, key), self._take_agent(), self._leave_agent, deadline)

    def _take_agent(self) -> Agent:
        """Return the agent that all readers of this transport share: an agent holds threads, and some twenty descriptors."""
        with _sharing:
            if self._agent is None:
                self._agent = Agent({**_POSTING, **self.options})
            self._readers += 1
            return self._agent

    def _leave_agent(self) -> None:
        with _sharing:
            self._readers -= 1
            if not self._readers and self._agent is not None:
                self._agent.close()
                self._agent = None
