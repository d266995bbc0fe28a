"""Transport ``nccl``: what ``collective`` is for host memory, between GPUs: one packs, the others unpack to where it belongs.

For memory that a reader cannot map (another host's, expandable segments, shards offloaded to host memory), and for readers that
want the same. Asking, gathering and epochs are those of every broadcast (:mod:`weightsync.transports.broadcast.transport`); the
bytes go as said below. NCCL takes each GPU once, so a trainer rank and an engine rank on the same GPU cannot use it: they have
``cuda_ipc``.

Many tiles of GPU memory to the same number of readers at NCCL's speed: packed into few buffers, broadcast, unpacked in place.

Both ends lay the same tiles, in the same order, into the same frames: a header, which travels with the bytes that it describes,
then each tile's runs, every tile at a multiple of 512 bytes. Frame ``k`` uses buffer ``k % num_buffers`` and that buffer's stream:
the sender packs it there in one launch and broadcasts it, a reader receives it and unpacks it to where its bytes belong in one
launch. Streams alone keep the order, so packing ``k + 1`` and unpacking ``k - 1`` run beside the broadcast of ``k``, and the host
is a buffer ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from weightsync.arrays import Bytes, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, TransportUnavailable, WeightSyncError
from weightsync.protocol.messages import Traits
from weightsync.tensors.copy_table import CopyTable, joined_tables
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.cuda.waiting import wait_until_idle
from weightsync.transports.broadcast.process_groups import Enqueue, ProcessGroup, init_custom_process_group
from weightsync.transports.broadcast.reader import Receipt, ReceivingWire, tiles_and_bytes
from weightsync.transports.broadcast.sender import BroadcastJob, Packer, SendingWire
from weightsync.transports.broadcast.transport import Broadcast, BufferSettings
from weightsync.transports.cuda.pinned import Pinned
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, PublishedRegion
from weightsync.transports.net.channel import DATA, HEADER, VERSION_AT, FrameHeader
from weightsync.transports.net.frames import HEADER_ROOM, packed_copies, packed_frames
from weightsync.transports.net.messages import Ready

DEFAULT_BUFFER = 256 << 20
"""Larger ones are hardly faster where the next is packed beside the broadcast of one: docs/benchmarks/gpu-broadcast.md."""

PROGRAMS = 64
"""Of a copy that runs beside a broadcast: enough to be faster than the link, and few enough to leave NCCL its processors."""

ALIGNMENT = 512
"""Of tiles in a frame, and the room of its header."""


def broadcast_frames(counts: Int64, sizes: Int64, buffer_bytes: int) -> Int64:
    """Cut groups of tiles into the frames of a broadcast: see :func:`weightsync.transports.net.frames.packed_frames`."""
    return packed_frames(counts, sizes, buffer_bytes, ALIGNMENT, header=True)


class PackedBroadcast:
    """Sends or receives ``tiles`` as packed broadcasts. Both ends must use the same ``frames``; the memory must not move.

    Buffers (never larger than a frame), streams and tables are made once, here; groups come and go. Not thread-safe.

    Args:
        tiles: The tiles, in memory that ``device`` can address.
        frames: From :func:`broadcast_frames`.
        device: The CUDA device.
        buffer_bytes: Bytes of a buffer.
        num_buffers: Buffers, used in turn.
        regions: At the sender, the address of each region that its tiles name.
        programs: Programs of a copy.

    Raises:
        TransportUnavailable: There is no room for the buffers.
    """

    def __init__(
        self,
        tiles: CopyTable,
        frames: Int64,
        device: torch.device,
        buffer_bytes: int,
        num_buffers: int,
        regions: Sequence[int] | None = None,
        programs: int = PROGRAMS,
    ) -> None:
        self._device, self._sends = device, regions is not None
        self._due = _headers_of(frames)
        self._sizes = (frames[:, 4] + ALIGNMENT).tolist()
        each = min(buffer_bytes, max(self._sizes, default=0))
        count = min(num_buffers, len(frames))
        try:
            self._buffers = [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(count)]
            self._headers = torch.zeros(max(len(frames), 1), HEADER_ROOM, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise TransportUnavailable(
                f"no room for {count} buffers of {each:,} bytes on {device}: give transport 'nccl' smaller or fewer ones"
            ) from error
        self._streams = [torch.cuda.Stream(device) for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._free = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self.nbytes = tiles.nbytes
        """Bytes that are moved."""
        self.buffer_bytes = each * count
        """Device memory that the buffers take."""
        buffers = [buffer.data_ptr() for buffer in self._buffers]
        cut = packed_copies(tiles, frames, buffers, regions, ALIGNMENT, self._headers.data_ptr())
        with torch.cuda.device(device):
            self._copy = TileCopy([[(table, (0,))] for table in cut], device, programs=programs)

    def run(
        self,
        group: ProcessGroup,
        version: int,
        deadline: Deadline,
        frames: tuple[int, int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Send (rank 0 of an NCCL ``group``) or receive (others) ``frames`` (first, end; all); returns when they are in place here.

        ``check`` is called before each, and raises to end it. Raises as :meth:`ProcessGroup.on_device` does, and
        :class:`~weightsync.errors.ProtocolError` at a reader to which other frames came than were due.
        """
        first, end = frames or (0, len(self._due))
        due = self._due[first:end]
        due[:, VERSION_AT : VERSION_AT + 8] = np.array([version], "<i8").view(np.uint8)

        def work(broadcast: Enqueue) -> None:
            if self._sends:
                self._headers[first:end].copy_(torch.from_numpy(due))
            self._enqueue(broadcast, first, end, check)

        if first < end:
            group.on_device(self._device, work, deadline)
            if not self._sends:
                self._check_headers(due, first, end)

    def _enqueue(self, broadcast: Enqueue, first: int, end: int, check: Callable[[], None]) -> None:
        begun = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(begun)
        for sequence in range(first, end):
            turn = sequence % len(self._buffers)
            if sequence - first >= len(self._buffers):
                self._free[turn].synchronize()  # no further ahead: memory that was withdrawn is soon not read any more
            check()
            with torch.cuda.stream(self._streams[turn]):
                if self._sends:
                    self._copy.launch(sequence, sequence + 1)
                broadcast(self._buffers[turn][: self._sizes[sequence]])
                if not self._sends:
                    self._copy.launch(sequence, sequence + 1)
                self._free[turn].record()
        for stream in self._streams:
            stream.synchronize()

    def _check_headers(self, due: Bytes, first: int, end: int) -> None:
        headers = self._headers[first:end].cpu().numpy()
        wrong = np.flatnonzero((headers != due).any(axis=1))
        if len(wrong):
            at = int(wrong[0])
            came, wanted = (FrameHeader.unpack(raw[: HEADER.size].tobytes()) for raw in (headers[at], due[at]))
            raise ProtocolError(f"a broadcast brought frame {tuple(came)} where {tuple(wanted)} was due")


def _headers_of(frames: Int64) -> Bytes:
    """The header of each frame, ``uint8[frames, 64]``, but for the version: made once, as a round must not wait for it."""
    headers = np.zeros((len(frames), HEADER_ROOM), np.uint8)
    for sequence, (number, offset, first, last, nbytes) in enumerate(frames.tolist()):
        header = FrameHeader(DATA, sequence, 0, number, first - offset, last - offset, nbytes)
        headers[sequence, : HEADER.size] = np.frombuffer(header.pack(), np.uint8)
    return headers


def frames_of_groups(frames: Int64, groups: int) -> list[tuple[int, int]]:
    """Which frames each of so many groups has: first, end."""
    edges = np.searchsorted(frames[:, 0], np.arange(groups + 1)).tolist()
    return list(pairwise(edges))


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
        return _DeviceSending(region, self.buffers)

    def receiving(self) -> ReceivingWire:
        """See :class:`weightsync.transports.broadcast.transport.Broadcast`."""
        reason = self.unavailable()
        if reason is not None:
            raise TransportUnavailable(reason)
        return _DeviceReceiving(torch.device("cuda", torch.cuda.current_device()), self.buffers)


def _joining(device: torch.device) -> Callable[..., ProcessGroup]:
    return partial(init_custom_process_group, "nccl", device=device, priority=True)


def _one_byte(device: torch.device) -> list[torch.Tensor]:
    """What a first broadcast sends, by which a communicator connects."""
    return [torch.zeros(1, dtype=torch.uint8, device=device)]


def _name_of_gpu(device: torch.device) -> str:
    """What no other GPU is called, on any host."""
    return str(torch.cuda.get_device_properties(device).uuid)


class _DeviceSending(SendingWire):
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
        self.join = _joining(self._device)

    @property
    def regions(self) -> Sequence[int]:
        if isinstance(self._region, CudaRegion):
            return self._region.addresses
        return () if self._pinned is None else (self._pinned.address,)

    @cached_property
    def buffer_bytes(self) -> int:
        return self._buffers.bytes_each(torch.cuda.mem_get_info(self._device)[0], DEFAULT_BUFFER)

    def cut(self, counts: Int64, sizes: Int64) -> Int64:
        return broadcast_frames(counts, sizes, self.buffer_bytes)

    def packer(self) -> Packer:
        return _DevicePacker(self._device, self.buffer_bytes, self._buffers.num_buffers)

    def ready(self) -> Ready:
        return Ready(_name_of_gpu(self._device))  # which no reader may use

    def close(self) -> None:
        super().close()
        if self._pinned is not None:
            self._pinned.close()


class _DevicePacker(Packer):
    """Makes buffers and tables when they are first used."""

    def __init__(self, device: torch.device, buffer_bytes: int, num_buffers: int) -> None:
        self._device, self._buffer_bytes, self._num_buffers = device, buffer_bytes, num_buffers
        self._made_for: tuple[bytes, tuple[int, ...]] = b"", ()
        self._packed: PackedBroadcast | None = None

    def send(self, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:
        self._made(job).run(group, job.version, deadline, check=job.check)

    def warm_up(self, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:
        self._made(job)
        group.broadcast(_one_byte(self._device), deadline)

    def _made(self, job: BroadcastJob) -> PackedBroadcast:
        """The one in hand, unless other tiles are wanted or the trainer's memory moved."""
        made_for = job.request, tuple(job.regions)
        if self._packed is None or made_for != self._made_for:
            self._packed = None  # two would not fit
            self._packed = PackedBroadcast(job.tiles, job.frames, self._device, self._buffer_bytes, self._num_buffers, job.regions)
            self._made_for = made_for
        return self._packed


class _DeviceReceiving(ReceivingWire):
    """To the memory of ``device``, through ``num_buffers`` buffers of the publisher's size there, and a table of tiles."""

    warms_up = True

    def __init__(self, device: torch.device, settings: BufferSettings) -> None:
        self._device, self._settings = device, settings
        self._packed: PackedBroadcast | None = None
        self._groups: Sequence[CopyTable] = ()
        self._buffer_bytes = 0
        self._frames_of: list[tuple[int, int]] = []
        self.join = _joining(device)

    def accept(self, ready: Ready) -> None:
        if ready.device == _name_of_gpu(self._device):
            raise TransportUnavailable(
                f"NCCL cannot send from {self._device} to itself: allow cuda_ipc for trainer and engine ranks on the same GPU"
            )

    def make_room(self, groups: Sequence[CopyTable], buffer_bytes: int, peer: str) -> None:
        if self._packed is not None and groups is self._groups and self._buffer_bytes == buffer_bytes:
            return
        frames = broadcast_frames(*tiles_and_bytes(groups), buffer_bytes)
        self._packed = None  # two would not fit
        self._packed = PackedBroadcast(
            CopyTable.of_table(joined_tables(groups)), frames, self._device, buffer_bytes, self._settings.num_buffers
        )
        self._frames_of = frames_of_groups(frames, len(groups))
        self._groups, self._buffer_bytes = groups, buffer_bytes

    def warm_up(self, group: ProcessGroup, deadline: Deadline) -> None:
        group.broadcast(_one_byte(self._device), deadline)

    def receive(self, group: ProcessGroup, version: int, deadline: Deadline) -> Receipt:
        if self._packed is None:
            raise ProtocolError("a transfer began without buffers")
        if version != EMPTY:  # readers of the targets must be done before they change
            wait_until_idle(self._device, deadline, f"what this engine rank has queued on its device before version {version}")
        return _DeviceReceipt(group, self._packed, self._frames_of, version)

    def release(self) -> None:
        self._packed, self._groups = None, ()


class _DeviceReceipt(Receipt):
    """Receives while it is read, not ahead. So one GPU never waits for two senders, each of which may wait for another reader."""

    def __init__(self, group: ProcessGroup, packed: PackedBroadcast, frames_of: list[tuple[int, int]], version: int) -> None:
        self._group, self._packed = group, packed
        self._frames_of, self._version, self._next = frames_of, version, 0

    def read(self, group: int, tiles: CopyTable, deadline: Deadline, digests: UInt64 | None) -> None:
        if digests is not None:
            raise ProtocolError("nccl takes no digests while it reads: use weightsync.tensors.cuda.digest.LayoutDigest")
        first, end = self._frames_of[group]
        if first != end and first != self._next:
            raise ProtocolError(f"group {group} was read out of order")
        self._packed.run(self._group, self._version, deadline, (first, end))
        self._next = max(self._next, end)

    def frames(self) -> int:
        count = self._frames_of[-1][1] if self._frames_of else 0
        if self._next != count:
            raise ProtocolError("not every group was read")
        return count

    def abort(self, error: WeightSyncError) -> None:
        """Nothing to do: the group is closed where the connection is watched."""

    def ended(self, seconds: float) -> bool:
        return True
