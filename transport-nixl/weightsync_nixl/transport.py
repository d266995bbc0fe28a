"""Transport ``nixl``: readers pull memory of the publisher's host or GPU by one-sided reads, over RDMA, NVLink or shared memory.

Reader and publisher meet at an authenticated connection, like that of ``tcp``, over which the publisher describes its memory. A
read then needs no thread of the publisher. Long runs are read directly to where they belong. What is cut too finely for that goes
in frames that the publisher packs (:mod:`weightsync_nixl.staged_frames`). The shortest run that is read directly is
measured when a plan is prepared.

A one-sided read tears silently if the memory changes meanwhile. The region's header page, a sequence lock, is therefore read before
and after, and the engine compares the digest of what arrived.

NIXL encrypts nothing, and UCX opens ports of its own: name the interface (``devices``) and keep the network to yourself.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol.messages import Host, Memory, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import HEADER_BYTES, PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.dialer import dialer
from weightsync.transports.net.frames import wanted_tiles
from weightsync.transports.net.listening_publisher import ListenAddress, ListeningPublisher, NetworkTransport, PublisherAddress
from weightsync.transports.net.messages import Handlers, Ready, RegisterTiles, TableBudget, serve_requests
from weightsync_nixl.agent import Agent, network_devices, nixl_problem, rdma_devices, span_of
from weightsync_nixl.reader import MESSAGES, POSTING_THREADS, DescribeMemory, MemoryDescription, NixlReader, Pack
from weightsync_nixl.staged_frames import (
    BUFFER_BYTES,
    MOST_BUFFER_BYTES,
    TILE_BYTES,
    Copies,
    Frames,
    StagingBuffers,
    copies,
)

_PACK_SECONDS = 60.0


class _Registration:
    """A region registered with a separate agent. Its memory stays mapped until :meth:`close`."""

    def __init__(self, region: PublishedRegion | CudaRegion, options: Mapping[str, str], buffer_bytes: int) -> None:
        self.agent = Agent(options)
        with OnFailure(self.close):
            if isinstance(region, CudaRegion):
                exported = region.exported
                number, offset, size = exported.regions()
                bases = np.array([*exported.bases, 0], np.int64)
                self.memory, self.device, self.exports = "cuda", region.device, exported.count
                self.regions = np.stack([bases[number] + offset, size], axis=1)
                self._page = region.page
                self.agent.register("host", span_of(self._page[:HEADER_BYTES]))
                if exported.bases:
                    self.agent.register("cuda", np.array([exported.bases, exported.sizes], np.int64).T, region.device)
            else:
                self.memory, self.device, self.exports = "host", 0, 0
                self.regions = np.array([[region.address, region.nbytes]], np.int64)
                self._page = region.memory
                self.agent.register("host", span_of(self._page))
        self.layout_digest, self.buffer_bytes = region.layout_digest, buffer_bytes

    memory: Memory

    def describe(self, buffers: tuple[int, ...]) -> MemoryDescription:
        return MemoryDescription(
            self.agent.metadata,
            self.memory,
            self.device,
            self.exports,
            self.layout_digest,
            int(self._page.ctypes.data),
            self.regions.astype("<i8").tobytes(),
            self.buffer_bytes,
            buffers,
        )

    def close(self) -> None:
        self.agent.close()
        self._page = np.empty(0, np.uint8)


class _FrameServer:
    """Answers one reader. Owns its staging buffers."""

    def __init__(self, publisher: NixlPublisher, channel: Channel) -> None:
        self._publisher, self._channel = publisher, channel
        self._frames: Frames | None = None
        self._packed_from: _Registration | None = None
        self._copies: Copies | None = None
        self._staging: StagingBuffers | None = None

    def run(self) -> None:
        handlers: Handlers = {DescribeMemory: self._describe, RegisterTiles: self._remember, Pack: self._pack}
        try:
            serve_requests(self._channel, self._publisher.budget, handlers, MESSAGES)
        finally:
            self._publisher.unstage(self)

    def _describe(self, _: DescribeMemory) -> MemoryDescription:
        return self._publisher.registration().describe(self._staging.addresses if self._staging else ())

    def _remember(self, want: RegisterTiles) -> Ready:
        registration = self._publisher.registration()
        tiles, counts = wanted_tiles(want, registration.layout_digest, registration.regions[:, 1].tolist(), TILE_BYTES)
        self._frames = Frames.of(tiles, counts, registration.buffer_bytes)
        self._staging, self._copies = self._publisher.stage(self, self._frames.largest), None
        return Ready()

    def _pack(self, request: Pack) -> Ready:
        frame = request.frame
        if self._frames is None or self._staging is None or not 0 <= frame < len(self._frames):
            raise ProtocolError(f"frame {frame} was not registered")
        registration = self._publisher.registration()
        if self._copies is None or self._packed_from is not registration:
            regions = tuple(registration.regions[:, 0].tolist())
            tables = self._frames.copies(self._staging.addresses, regions)
            self._copies, self._packed_from = copies(tables, registration.memory, registration.device), registration
        with self._publisher.busy():
            self._copies(frame, Deadline(_PACK_SECONDS))
        return Ready()


class NixlPublisher(ListeningPublisher):
    """Registers a region with NIXL, describes it to authenticated readers, and packs frames for them."""

    def __init__(
        self,
        transport: Transport,
        options: Mapping[str, str],
        region: PublishedRegion | CudaRegion,
        key: bytes,
        local_host: Host,
        bind: str,
        buffer_bytes: int | None,
    ) -> None:
        if isinstance(region, CudaRegion):
            region.export()
        memory: Memory = "cuda" if isinstance(region, CudaRegion) else "host"
        self._region, self._options = region, options
        self._buffer_bytes = max(buffer_bytes or BUFFER_BYTES[memory], 2 * TILE_BYTES)
        self._total = sum(region.sizes)
        self._staged: dict[_FrameServer, tuple[object, StagingBuffers]] = {}
        self._lock = threading.Lock()
        self._current = _Registration(region, self._options, self._buffer_bytes)
        self.budget = TableBudget(self._total)
        with OnFailure(self._current.close):
            super().__init__(transport, key, local_host, ListenAddress(bind))

    def registration(self) -> _Registration:
        """Return the current registration: a new one, with a new agent, if the trainer's memory has moved."""
        with self._lock:
            region = self._region
            if isinstance(region, CudaRegion) and region.exported.count != self._current.exports:
                new = _Registration(region, self._options, self._buffer_bytes)
                for server, (_, staging) in self._staged.items():
                    self._staged[server] = new.agent.register(new.memory, staging.span, new.device), staging
                self._current.close()
                self._current = new
            return self._current

    def stage(self, server: _FrameServer, nbytes: int) -> StagingBuffers | None:
        """Give ``server`` staging buffers of ``nbytes`` bytes, instead of those it has. Raises ProtocolError without room."""
        self.unstage(server)
        if not nbytes:
            return None
        with self._lock:
            staged = sum(staging.nbytes for _, staging in self._staged.values())
            if staged + nbytes > max(self._total, 1 << 30):
                raise ProtocolError(f"the readers of this source take {staged:,} bytes of staging memory: no room for another")
            current = self._current
            staging = StagingBuffers(nbytes, current.memory, current.device)
            self._staged[server] = current.agent.register(current.memory, staging.span, current.device), staging
            return staging

    def unstage(self, server: _FrameServer) -> None:
        """Take back the staging buffers of ``server``."""
        with self._lock:
            token, _ = self._staged.pop(server, (None, None))
            if token is not None:
                self._current.agent.deregister(token)

    def _serve(self, channel: Channel) -> None:
        _FrameServer(self, channel).run()

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`. A read that runs ends with an error at its reader."""
        super().close()
        with self._lock:
            self._current.close()


_sharing = threading.Lock()
_POSTING = {"num_threads": str(POSTING_THREADS), "split_batch_size": "64"}
"""Parameters of a reader's agent: many pieces are posted by several threads, as posting one takes as long as copying megabytes."""


class Nixl(NetworkTransport):
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
    before = "tcp"
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

    def condition(self) -> tuple[str, str]:
        """See :class:`weightsync.transports.base.Transport`."""
        devices = rdma_devices()
        if not devices:
            return "no RDMA device has a link", "between hosts NIXL uses TCP; transport tcp is faster"
        description = f"RDMA: {', '.join(devices)}"
        if not Path("/sys/module/nvidia_peermem").exists():
            return description, "GPU memory crosses host memory (no GPUDirect): modprobe nvidia_peermem"
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return description, "" if soft == resource.RLIM_INFINITY else f"only {soft:,} bytes may be registered: ulimit -l unlimited"

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
