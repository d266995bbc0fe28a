"""Many tiles of GPU memory to the same number of readers at NCCL's speed: packed into few buffers, broadcast, unpacked in place.

Both ends lay the same tiles, in the same order, into the same frames: a header, which travels with the bytes that it describes,
then each tile's runs, every tile at a multiple of 512 bytes. Frame ``k`` uses buffer ``k % num_buffers`` and that buffer's stream:
the sender packs it there in one launch and broadcasts it, a reader receives it and unpacks it to where its bytes belong in one
launch. Streams alone keep the order, so packing ``k + 1`` and unpacking ``k - 1`` run beside the broadcast of ``k``, and the host
is a buffer ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from weightsync.arrays import Bytes, Int64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, TransportUnavailable
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.transports.broadcast.process_groups import Enqueue, ProcessGroup
from weightsync.transports.net.channel import DATA, HEADER, VERSION_AT, FrameHeader
from weightsync.transports.net.frames import HEADER_ROOM, packed_copies, packed_frames

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
