"""The reader's end of ``nixl``: plans which runs are read directly and which in frames, and pulls both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import msgspec
import numpy as np

from weightsync.arrays import Int64, UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError
from weightsync.protocol.messages import Memory
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import CopyTable, joined_tables
from weightsync.transports.base import Completion, Deferred
from weightsync.transports.cuda.driver import allocation_of, device_at
from weightsync.transports.cuda.region import export_count
from weightsync.transports.host.mapped import HeaderReader
from weightsync.transports.host.region import HEADER_BYTES, Header
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.connected_reader import ConnectedReader, Dial
from weightsync.transports.net.messages import (
    ANSWER_BYTES,
    ControlMessage,
    Fail,
    Messages,
    Ready,
    RegisterTiles,
    Start,
    next_answer,
    send_request,
)
from weightsync_nixl.agent import Agent, Transfer, span_of
from weightsync_nixl.staged_frames import (
    BUFFERS,
    MOST_BUFFER_BYTES,
    TILE_BYTES,
    Copies,
    Frames,
    StagingBuffers,
    copies,
    split,
)


class DescribeMemory(ControlMessage, frozen=True):
    """Of ``nixl``: asks where the publisher's memory is; answered by :class:`MemoryDescription` or :class:`Fail`."""


class MemoryDescription(ControlMessage, frozen=True):
    """Where a publisher's memory is, and what a NIXL agent needs to read it.

    Attributes:
        agent: Metadata of the publisher's agent.
        memory: Memory of the regions; the header page is always in host memory.
        device: CUDA device of the regions.
        exports: How often the publisher has exported its memory.
        layout_digest: Layout of the regions.
        header: Address of the header page.
        regions: Address and bytes of each region, little-endian ``int64[regions, 2]``.
        buffer_bytes: Most bytes of a frame.
        buffers: Address of each of this reader's staging buffers, if it registered tiles.
    """

    agent: bytes
    memory: Memory
    device: int
    exports: int
    layout_digest: str
    header: int
    regions: bytes
    buffer_bytes: int
    buffers: tuple[int, ...]


class Pack(ControlMessage, frozen=True):
    """Of ``nixl``: pack this frame of the registered tiles into its staging buffer; answered by :class:`Ready` or :class:`Fail`."""

    frame: int


MESSAGES: Messages = msgspec.msgpack.Decoder(RegisterTiles | Start | Ready | Fail | DescribeMemory | MemoryDescription | Pack)


POSTING_THREADS = 2
"""More gain nothing between two GPUs (docs/benchmarks/gpu-rounds.md)."""

_DESCRIPTION_BYTES = 64 << 20  # a million regions
_DRAIN_SECONDS = 10.0
_STAMP_BYTES = 256  # of a header page: everything that changes
_PROBES, _PROBE_BYTES, _PROBE_RUN = 32, 4096, 4 << 20
_LEAST_RUN, _MOST_RUN = 16 << 10, 16 << 20
_TOUCH_BYTES = 64


class _ReadPlan:
    """What a prepared plan holds while its agent's peer is ``name``: registrations, and a transfer for each group and frame."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tokens: list[object] = []
        self.groups: list[Transfer | None] = []
        self.frames: list[Transfer] = []
        self.first_frame: list[int] = []
        self.unpack: Copies | None = None
        self.staging: StagingBuffers | None = None

    def register(self, memory: Memory, spans: Int64, device: int) -> None:
        if len(spans):
            self._tokens.append(self._agent.register(memory, spans, device))

    def _transfers(self) -> Iterator[Transfer]:
        return (transfer for transfer in (*self.groups, *self.frames) if transfer is not None)

    def drain(self, deadline: Deadline) -> None:
        """Wait for reads that an earlier transfer left running. Raises :class:`~weightsync.errors.DeadlineExceeded`."""
        for transfer in self._transfers():
            if transfer.running:
                with suppress(PeerLost):
                    transfer.wait(deadline)

    def unpack_frame(self, number: int | None, deadline: Deadline) -> None:
        """Copy a frame that arrived to its targets; ``None`` does nothing."""
        if number is not None and self.unpack is not None:
            self.unpack(number, deadline)

    def close(self, deadline: Deadline) -> None:
        """Release everything. Nothing is written to the targets after this.

        Raises DeadlineExceeded, or TransportError, if a read runs that cannot be cancelled.
        """
        self.drain(deadline)
        for transfer in self._transfers():
            transfer.release()
        self.groups, self.frames = [], []
        for token in self._tokens:
            self._agent.deregister(token)
        self._tokens.clear()


class NixlReader(ConnectedReader, HeaderReader):
    """Reads a publisher's memory into that of this host or of its GPU. ``leave`` lets go of the agent."""

    _largest_tile = TILE_BYTES
    _messages = MESSAGES

    def __init__(self, dial: Dial, agent: Agent, leave: Callable[[], None], deadline: Deadline) -> None:
        self._agent, self._leave, self._left = agent, leave, False
        self._peer = "the source"
        self._described: MemoryDescription | None = None
        self._remote = ""
        self._regions: Int64 = np.empty((0, 2), np.int64)
        self._page = np.zeros(HEADER_BYTES, np.uint8)
        self._page_token: object = None
        self._header_read: Transfer | None = None
        self._memory: Memory = "host"
        self._on = 0
        self._pieces: list[Int64] = []
        self._plan: _ReadPlan | None = None  # made when it is missing
        self._frames_asked = self._frames_taken = 0
        self._stop = threading.Event()
        with OnFailure(self.close):
            self._page_token = agent.register("host", span_of(self._page))
            super().__init__(dial, deadline)
            self._describe(self._connected(deadline), deadline)

    def _describe(self, channel: Channel, deadline: Deadline) -> MemoryDescription:
        """Ask where the publisher's memory lies now."""
        self._peer = channel.peer
        answer = self._asked(channel, DescribeMemory(), deadline, _DESCRIPTION_BYTES)
        if not isinstance(answer, MemoryDescription) or len(answer.regions) % 16:
            raise ProtocolError(f"{channel.peer} described its memory wrongly")
        if not 2 * TILE_BYTES <= answer.buffer_bytes <= MOST_BUFFER_BYTES:
            raise ProtocolError(
                f"{channel.peer} asks for staging buffers of {answer.buffer_bytes:,} bytes: {MOST_BUFFER_BYTES:,} at most"
            )
        regions = np.frombuffer(answer.regions, "<i8").astype(np.int64).reshape(-1, 2)
        if regions.size and (regions.min() < 0 or regions.max() > np.iinfo(np.int64).max // 2):
            raise ProtocolError(f"{channel.peer} described a region at an impossible address")
        if self._header_read is not None:
            self._header_read.release()
            self._header_read = None
        before, self._remote = self._remote, ""
        remote = self._agent.add(answer.agent, instead_of=before)
        self._described, self._remote, self._regions, self._layout_digest = answer, remote, regions, answer.layout_digest
        source, target = (np.array([[address, _STAMP_BYTES]], np.int64) for address in (answer.header, self._page.ctypes.data))
        self._header_read = self._agent.prepare(("host", target, 0), remote, ("host", source, 0), self._peer)
        return answer

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        super().abort()
        self._stop.set()

    def _idle(self) -> None:
        super()._idle()
        self._stop.clear()

    def _unfinished(self) -> bool:
        return self._frames_asked > self._frames_taken

    def _take_ready(self, ready: Ready) -> None:
        self._drop_plan(Deadline(_DRAIN_SECONDS))  # staging buffers are others now

    def _drop_plan(self, deadline: Deadline) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close(deadline)

    # Preparing.

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._drop_plan(deadline)
        self._stamp, self._want, self._pieces = None, None, []
        self._idle()
        described = self._describe(self._connected(deadline), deadline)
        self._check_layout(layout_digest)
        for tiles in groups:
            check_tiles(tiles, self._regions[:, 1].tolist())
        first = next((int(tiles.target[0]) for tiles in groups if len(tiles)), 0)
        device = device_at(first)
        self._memory, self._on = ("host", 0) if device is None else ("cuda", device)
        least = self._least_run(described, deadline) if first else 0
        divided = [split(tiles, least) for tiles in groups]
        super().prepare([tiles for _, tiles in divided], layout_digest, deadline)
        self._pieces = [pieces for pieces, _ in divided]
        self._planned(deadline)

    def _planned(self, deadline: Deadline) -> _ReadPlan:
        """Return the plan, a new one if the connection or the publisher's memory has changed."""
        if self._plan is None:
            described = self._describe(self._connected(deadline), deadline)
            plan = _ReadPlan(self._agent)
            with OnFailure(plan.close, deadline):
                self._fill(plan, described)
                self._touch(described, deadline)
            self._plan = plan
        return self._plan

    def _fill(self, plan: _ReadPlan, described: MemoryDescription) -> None:
        """Register the targets, and prepare a transfer for each group and each frame."""
        plan.register(self._memory, self._target_spans(), self._on)
        for pieces in self._pieces:
            source = np.stack([self._regions[pieces[:, 0], 0] + pieces[:, 1], pieces[:, 3]], axis=1)
            plan.groups.append(self._transfer(pieces[:, 2:], source, described) if len(pieces) else None)
        counts = np.array([len(tiles) for tiles in self._groups], np.int64)
        packed = CopyTable.of_table(joined_tables(self._groups))
        frames = Frames.of(packed, counts, described.buffer_bytes)
        plan.first_frame = np.searchsorted(frames.table[:, 0], np.arange(len(self._groups) + 1)).tolist()
        if not len(frames):
            return
        if len(described.buffers) != BUFFERS:
            raise ProtocolError(f"{self._peer} has {len(described.buffers)} staging buffers, not {BUFFERS}")
        plan.staging = StagingBuffers(frames.largest, self._memory, self._on)
        plan.register(self._memory, plan.staging.span, self._on)
        plan.unpack = copies(frames.copies(plan.staging.addresses, None), self._memory, self._on)
        for number, nbytes in enumerate(frames.table[:, 4].tolist()):
            local, remote = plan.staging.addresses[number % BUFFERS], described.buffers[number % BUFFERS]
            plan.frames.append(self._transfer(np.array([[local, nbytes]]), np.array([[remote, nbytes]]), described))

    def _touch(self, described: MemoryDescription, deadline: Deadline) -> None:
        """Read a few bytes of each region that is read directly.

        Between GPUs of a host UCX maps an allocation at the first read of it, which takes 0.3 ms. Without this, that read would be
        in a round, while the engine is paused.
        """
        pieces = np.concatenate([np.empty((0, 4), np.int64), *self._pieces])
        pieces = pieces[np.unique(pieces[:, 0], return_index=True)[1]]
        if len(pieces):
            sizes = np.minimum(pieces[:, 3], _TOUCH_BYTES)
            source = np.stack([self._regions[pieces[:, 0], 0] + pieces[:, 1], sizes], axis=1)
            with self._scratch(_TOUCH_BYTES) as (scratch, address):
                transfer = self._transfer(np.stack([np.full(len(pieces), address), sizes], axis=1), source, described)
                scratch.groups.append(transfer)
                transfer.start()
                transfer.wait(deadline, self._stop)

    @contextmanager
    def _scratch(self, nbytes: int) -> Iterator[tuple[_ReadPlan, int]]:
        """A plan of its own, with ``nbytes`` bytes to read into, and their address."""
        plan = _ReadPlan(self._agent)
        try:
            plan.staging = StagingBuffers(nbytes, self._memory, self._on)
            plan.register(self._memory, plan.staging.span, self._on)
            yield plan, plan.staging.addresses[0]
        finally:
            plan.close(Deadline(_DRAIN_SECONDS))

    def _transfer(self, target: Int64, source: Int64, described: MemoryDescription) -> Transfer:
        local = self._memory, target, self._on
        return self._agent.prepare(local, self._remote, (described.memory, source, described.device), self._peer)

    def _target_spans(self) -> Int64:
        """What must be registered of the targets: the pieces where they are neighbours, or the allocations that hold them."""
        pieces = np.concatenate([np.empty((0, 4), np.int64), *self._pieces])
        pieces = pieces[np.argsort(pieces[:, 2], kind="stable")]
        if not len(pieces):
            return np.empty((0, 2), np.int64)
        start, end = pieces[:, 2], np.maximum.accumulate(pieces[:, 2] + pieces[:, 3])
        first = np.flatnonzero(np.concatenate([[True], start[1:] > end[:-1]]))
        last = np.concatenate([first[1:], [len(pieces)]]) - 1
        if self._memory == "host":
            return np.stack([start[first], end[last] - start[first]], axis=1)
        held: dict[int, int] = {}
        until = 0
        for address in start.tolist():  # neighbours may be of two allocations
            if address >= until:
                allocation = allocation_of(address, self._on)
                held[allocation.base], until = allocation.nbytes, allocation.end
        return np.array(list(held.items()), np.int64)

    def _least_run(self, described: MemoryDescription, deadline: Deadline) -> int:
        """Measure from how many bytes on a run is read directly: where pieces of that size reach the rate that frames reach.

        That is three fifths of the rate of one large read (docs/benchmarks/gpu-rounds.md). The probe's pieces are too few to be
        divided among the threads.
        """
        largest = int(self._regions[:, 1].argmax()) if len(self._regions) else -1
        if largest < 0 or self._regions[largest, 1] < _PROBE_RUN:
            return _LEAST_RUN
        with self._scratch(_PROBE_RUN) as (probe, address):
            apart = 2 * _PROBE_BYTES * np.arange(_PROBES, dtype=np.int64)
            seconds = []
            for offsets, nbytes in ((apart, _PROBE_BYTES), (np.zeros(1, np.int64), _PROBE_RUN)):
                size = np.full(len(offsets), nbytes, np.int64)
                target, source = (np.stack([at + offsets, size], axis=1) for at in (address, int(self._regions[largest, 0])))
                transfer = self._transfer(target, source, described)
                probe.groups.append(transfer)
                took = []
                for _ in range(3):
                    started = time.perf_counter()
                    transfer.start()
                    transfer.wait(deadline, self._stop)
                    took.append(time.perf_counter() - started)
                seconds.append(min(took))
            least = 1.5 * seconds[0] / _PROBES / POSTING_THREADS * _PROBE_RUN / seconds[1]
        return int(min(max(least, _LEAST_RUN), _MOST_RUN))

    # A transfer.

    def _publisher_lives(self) -> bool:
        return self._channel is not None and self._channel.peer_lives()

    def _read_header(self, deadline: Deadline) -> Header:
        """Read the publisher's header page as it is now."""
        if self._header_read is None:
            raise PeerLost(f"{self._peer} is not connected")
        if self._header_read.running:
            self._header_read.wait(deadline, self._stop)
        self._header_read.start()
        self._header_read.wait(deadline, self._stop)
        return Header(self._page)

    def require(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.require`."""
        self._idle()
        self._connected(deadline)
        self._read_header(deadline).require(version)

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`. Waits for work that this process has on a device of the targets."""
        self._stamp = None
        self._idle()
        self._frames_asked = self._frames_taken = 0
        if self._plan is not None:
            self._plan.drain(deadline)
        channel = self._connected(deadline)
        plan = self._planned(deadline)
        stamp = self._read_header(deadline).require(version)
        if self._described is not None and export_count(self._page) != self._described.exports:
            self._drop_plan(deadline)
            plan = self._planned(deadline)
        if self._memory == "cuda":
            from weightsync.tensors.cuda.waiting import wait_until_idle

            wait_until_idle(self._on, deadline, f"what this engine rank has queued on its device before version {version}")
        self._stamp = stamp
        self._ask_frame(plan, channel, deadline)

    def _ask_frame(self, plan: _ReadPlan, channel: Channel, deadline: Deadline) -> None:
        """Let the publisher pack the next frame."""
        if self._frames_asked < len(plan.frames):
            send_request(channel, Pack(self._frames_asked), deadline)
            self._frames_asked += 1

    def _running(self) -> tuple[Channel, _ReadPlan]:
        return self._under_way(None if self._stamp is None else self._plan)

    def submit(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> Completion:
        """See :meth:`weightsync.transports.base.Reader.submit`."""
        if digests is not None:
            raise ProtocolError("nixl takes no digests while it reads: digest the targets when they are in place")
        self._check(deadline, f"reading group {group}")
        _, plan = self._running()
        self._check_group(group, len(plan.groups))
        transfer = plan.groups[group]
        if transfer is not None:
            transfer.start()
        return Deferred(partial(self._finish, group))

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        self.submit(group, deadline, digests).wait(deadline)

    def _finish(self, group: int, deadline: Deadline) -> None:
        """Wait for what was posted for a group, and take its frames."""
        self._check(deadline, f"reading group {group}")
        channel, plan = self._running()
        transfer = plan.groups[group]
        if transfer is not None:
            transfer.wait(deadline, self._stop)
        arrived: int | None = None
        for number in range(plan.first_frame[group], plan.first_frame[group + 1]):
            if number != self._frames_taken:
                raise ProtocolError(f"group {group} was read out of order")
            next_answer(channel, ANSWER_BYTES, deadline, MESSAGES)
            self._frames_taken += 1
            # While this frame is on its way, the publisher packs the next and the one before it is unpacked.
            plan.frames[number].start()
            self._ask_frame(plan, channel, deadline)
            plan.unpack_frame(arrived, deadline)
            plan.frames[number].wait(deadline, self._stop)
            arrived = number
        plan.unpack_frame(arrived, deadline)
        self._check(deadline, f"reading group {group}")

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        stamp, self._stamp = self._started(), None
        self._check(deadline, "ending the transfer")
        self._read_header(deadline).require_unchanged(stamp)

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`. Waits for reads that run, up to ten seconds."""
        super().close()
        if self._left:
            return
        self._left = True
        with ExitStack() as owned:  # the last first; a read that cannot be cancelled must not keep the agent
            owned.callback(self._leave)
            if self._remote:
                owned.callback(self._agent.remove, self._remote)
            if self._page_token is not None:
                owned.callback(self._agent.deregister, self._page_token)
            if self._header_read is not None:
                owned.callback(self._header_read.release)
                self._header_read = None
            self._drop_plan(Deadline(_DRAIN_SECONDS))
