"""The publisher's end of ``nixl``: registers a region, describes it to readers, and packs frames for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, StaleSource, TransportUnavailable, to_wire
from weightsync.protocol.messages import Host, Memory
from weightsync.transports.base import Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import HEADER_BYTES, PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.dialer import tune
from weightsync.transports.net.frames import wanted_tiles
from weightsync.transports.net.listening_publisher import ListeningPublisher
from weightsync.transports.net.messages import (
    ANSWER_SECONDS,
    IDLE_SECONDS,
    ControlMessage,
    Fail,
    Ready,
    RegisterTiles,
    TableBudget,
    next_request,
    send_request,
)
from weightsync.transports.nixl.agent import Agent, span_of
from weightsync.transports.nixl.memory_messages import MESSAGES, DescribeMemory, MemoryDescription, Pack
from weightsync.transports.nixl.staged_frames import BUFFER_BYTES, TILE_BYTES, Copies, Frames, StagingBuffers, copies

__all__ = ["NixlPublisher"]

Int64 = npt.NDArray[np.int64]

_PACK_SECONDS = 60.0


class _Registration:
    """A region registered with an agent of its own. Its memory stays mapped until :meth:`close`."""

    def __init__(self, region: PublishedRegion | CudaRegion, options: Mapping[str, str], buffer_bytes: int) -> None:
        self.agent = Agent(options)
        try:
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
        except BaseException:
            self.close()
            raise
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
        budget = self._publisher.budget
        try:
            while True:
                request = next_request(self._channel, budget, Deadline(IDLE_SECONDS), MESSAGES)
                try:
                    answer = self._answer(request)
                except (StaleSource, ProtocolError, TransportUnavailable) as error:
                    answer = Fail(*to_wire(error))
                send_request(self._channel, answer, Deadline(ANSWER_SECONDS))
        finally:
            budget.leave(self._channel)
            self._publisher.unstage(self)

    def _answer(self, request: ControlMessage) -> ControlMessage:
        if isinstance(request, DescribeMemory):
            return self._publisher.registration().describe(self._staging.addresses if self._staging else ())
        if isinstance(request, RegisterTiles):
            registration = self._publisher.registration()
            sizes = registration.regions[:, 1].tolist()
            tiles, counts = wanted_tiles(request, registration.layout_digest, sizes, TILE_BYTES)
            self._frames = Frames.of(tiles, counts, registration.buffer_bytes)
            self._staging, self._copies = self._publisher.stage(self, self._frames.largest), None
            return Ready()
        if isinstance(request, Pack):
            self._pack(request.frame)
            return Ready()
        raise ProtocolError(f"a reader does not say {type(request).__name__}")

    def _pack(self, frame: int) -> None:
        if self._frames is None or self._staging is None or not 0 <= frame < len(self._frames):
            raise ProtocolError(f"frame {frame} was not registered")
        registration = self._publisher.registration()
        if self._copies is None or self._packed_from is not registration:
            regions = tuple(registration.regions[:, 0].tolist())
            tables = self._frames.copies(self._staging.addresses, regions)
            self._copies, self._packed_from = copies(tables, registration.memory, registration.device), registration
        with self._publisher.busy():
            self._copies.run(frame, Deadline(_PACK_SECONDS))


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
        try:
            super().__init__(transport, key, local_host, bind, 0, None, False)
        except BaseException:
            self._current.close()
            raise

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
        tune(channel.socket)
        _FrameServer(self, channel).run()

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`. A read that runs ends with an error at its reader."""
        super().close()
        with self._lock:
            self._current.close()
