"""Transport ``collective``: broadcasts from host memory to host memory, along gloo's tree."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist

from weightsync.arrays import Bytes, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, ProtocolError, TransportUnavailable, WeightSyncError
from weightsync.protocol.messages import Traits
from weightsync.tensors.copies import check_keys, gather_tiles, scatter_and_digest
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group
from weightsync.transports.broadcast.reader import Receipt, ReceivingWire, tiles_and_bytes
from weightsync.transports.broadcast.sender import BroadcastJob, Packer, SendingWire
from weightsync.transports.broadcast.transport import Broadcast, BufferSettings
from weightsync.transports.host.memory import available_bytes
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import DATA, HEADER, FrameHeader
from weightsync.transports.net.frames import frames_of

_DEFAULT_BUFFER = 16 << 20


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
        return _HostSending(region, self.buffers)

    def receiving(self) -> ReceivingWire:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`."""
        return _HostReceiving(self.buffers)


def _frames(counts: Int64, sizes: Int64, buffer_bytes: int) -> Int64:
    """Return the frames that both ends make of tiles of ``sizes`` bytes: each with its header in one buffer.

    A frame takes one tile more than the last multiple, so this is what never gets larger than a buffer.
    """
    return frames_of(counts, sizes, buffer_bytes - HEADER.size - int(sizes.max(initial=0)))


def _header(frames: Int64, sequence: int, version: int) -> FrameHeader:
    number, offset, first, last, nbytes = frames[sequence].tolist()
    return FrameHeader(DATA, sequence, version, number, first - offset, last - offset, nbytes)


class _HostSending(SendingWire):
    """From a region of the host's memory, through buffers of the host's."""

    def __init__(self, region: PublishedRegion, buffers: BufferSettings) -> None:
        self._address, self.memory, self._buffers = region.address, region.payload, buffers
        self.join = partial(init_custom_process_group, "gloo")

    @property
    def regions(self) -> Sequence[int]:
        return (self._address,)

    @cached_property
    def buffer_bytes(self) -> int:
        return self._buffers.bytes_each(available_bytes() or 0, _DEFAULT_BUFFER)

    def cut(self, counts: Int64, sizes: Int64) -> Int64:
        return _frames(counts, sizes, self.buffer_bytes)

    def packer(self) -> Packer:
        return _HostPacker(self.buffer_bytes, self._buffers.num_buffers)


class _HostPacker(Packer):
    """Packs the next frames in a thread while one is on its way."""

    def __init__(self, buffer_bytes: int, num_buffers: int) -> None:
        self._buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(num_buffers)]

    def send(self, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:
        frames, addresses = job.frames, tuple(job.regions)

        def pack(sequence: int) -> torch.Tensor:
            first, last, nbytes = frames[sequence, 2:].tolist()
            buffer = self._buffers[sequence % len(self._buffers)]
            buffer[: HEADER.size] = np.frombuffer(_header(frames, sequence, job.version).pack(), np.uint8)
            gather_tiles(job.tiles, addresses, buffer.ctypes.data + HEADER.size, first, last)
            job.check()
            return torch.from_numpy(buffer[: HEADER.size + nbytes])

        count, ahead = len(frames), len(self._buffers) - 1
        with ThreadPoolExecutor(1, thread_name_prefix="weightsync-collective-pack") as pool:
            packed: list[Future[torch.Tensor]] = []
            try:
                for sequence in range(count):
                    while len(packed) < min(sequence + 1 + ahead, count):
                        packed.append(pool.submit(pack, len(packed)))
                    group.broadcast([deadline.result(packed[sequence], "packing a bucket")], deadline)
            finally:
                packed.clear()  # an error in one of them would keep this frame, and so the region's memory


class _HostReceiving(ReceivingWire):
    """To the host's memory, through ``num_buffers`` buffers of the publisher's size."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._buffers: list[Bytes] = []
        self._groups: Sequence[CopyTable] = ()
        self._frames = np.empty((0, 5), np.int64)
        self.join = partial(init_custom_process_group, "gloo")

    def make_room(self, groups: Sequence[CopyTable], buffer_bytes: int, peer: str) -> None:
        same = bool(self._buffers) and len(self._buffers[0]) == buffer_bytes
        if not same or groups is not self._groups:
            self._frames, self._groups = _frames(*tiles_and_bytes(groups), buffer_bytes), groups
        if same:
            return
        self._buffers = []
        needed, free = self._settings.num_buffers * buffer_bytes, available_bytes()
        if free is not None and needed > free:
            raise ProtocolError(f"{peer} broadcasts in buckets of which {needed:,} bytes do not fit here")
        self._buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(self._settings.num_buffers)]

    def receive(self, group: ProcessGroup, version: int, deadline: Deadline) -> Receipt:
        return _HostReceipt(group, self._frames, version, self._buffers, deadline)

    def release(self) -> None:
        self._buffers, self._groups = [], ()


class _HostReceipt(Receipt):
    """Receives frames ahead into the buffers, in a thread. One that broke stays so."""

    def __init__(
        self,
        group: ProcessGroup,
        frames: Int64,
        version: int,
        buffers: list[Bytes],
        deadline: Deadline,
    ) -> None:
        self._frames, self._version = frames, version
        self._group, self._buffers, self._deadline = group, buffers, deadline
        self._arrived = self._unpacked = 0
        self._ended: WeightSyncError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weightsync-collective-receive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for sequence in range(len(self._frames)):
                buffer = self._free(sequence)
                if buffer is None:
                    return
                due = _header(self._frames, sequence, self._version)
                self._group.broadcast([torch.from_numpy(buffer[: HEADER.size + due.nbytes])], self._deadline)
                header = FrameHeader.unpack(buffer[: HEADER.size].tobytes())
                if header != due:
                    raise ProtocolError(f"a broadcast brought bucket {tuple(header)} where {tuple(due)} was due")
                with self._changed:
                    self._arrived += 1
                    self._changed.notify_all()
        except WeightSyncError as error:
            self.abort(error.with_traceback(None))  # which would keep this, and so the buffers

    def _free(self, sequence: int) -> Bytes | None:
        """Wait until the buffer for this frame is free. Returns ``None`` if no reader wants it any more."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._ended is not None or sequence < self._unpacked + len(self._buffers),
                self._deadline.remaining("waiting for the engine to take a bucket"),
            )
            if not free:
                raise DeadlineExceeded(f"the engine did not take a bucket within {self._deadline.seconds:g} s")
            return None if self._ended is not None else self._buffers[sequence % len(self._buffers)]

    def read(self, group: int, tiles: CopyTable, deadline: Deadline, digests: UInt64 | None) -> None:
        if digests is not None:
            check_keys(tiles, digests)
        done = 0
        while done < len(tiles):
            at_end = self._unpacked == len(self._frames)
            number, offset, first, last, _ = [-1] * 5 if at_end else self._frames[self._unpacked].tolist()
            if number != group or first - offset != done:
                raise ProtocolError(f"group {group} was read out of order")
            frame = self._next(deadline).ctypes.data + HEADER.size
            scatter_and_digest(tiles, frame, done, last - offset, digests)
            done = last - offset
            with self._changed:
                self._unpacked += 1
                self._changed.notify_all()

    def _next(self, deadline: Deadline) -> Bytes:
        """Wait for the next frame. Its buffer is not overwritten before it was unpacked."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._ended is not None or self._arrived > self._unpacked, deadline.remaining("waiting for a broadcast")
            )
            if not arrived:
                raise DeadlineExceeded(f"a broadcast did not arrive within {deadline.seconds:g} s")
            if self._arrived <= self._unpacked and self._ended is not None:
                raise self._ended
            return self._buffers[self._unpacked % len(self._buffers)]

    def frames(self) -> int:
        if self._unpacked != len(self._frames):
            raise ProtocolError("not every group was read")
        return len(self._frames)

    def abort(self, error: WeightSyncError) -> None:
        # A broadcast that runs ends when the publisher notices, or at its deadline.
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()
