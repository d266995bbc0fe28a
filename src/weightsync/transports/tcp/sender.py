"""The owner's half of a carried transfer: remember what a reader wants, and stream it from the shelf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, StaleSource, to_wire
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import DATA, END, Channel, FrameHeader
from weightsync.transports.net.requests import (
    ANSWER_SECONDS,
    IDLE_SECONDS,
    MAX_GROUPS,
    Fail,
    Ready,
    RegisterTiles,
    Start,
    TableBudget,
    next_request,
    send_request,
    transfer_deadline,
)
from weightsync.transports.net.tile_limits import FRAME_BYTES, MAX_TILES
from weightsync.transports.tcp.tile_stream import TileStream

__all__ = ["Sender", "frames_of", "wanted_tiles"]


class Sender:
    """Serves one authenticated reader of ``region`` until it goes away. Holds a :class:`TileStream`.

    ``budget`` is what all readers of the shelf share; ``busy`` gives a context in which each transfer runs.
    """

    def __init__(
        self, region: PublishedRegion, channel: Channel, budget: TableBudget, busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._channel, self._budget, self._busy = channel, budget, busy
        self._layout_digest = region.layout_digest
        self._header = region.header  # with the payload, keeps the memory mapped whatever happens to the shelf
        self._payload = region.payload
        self._addresses = np.array([region.address], np.int64)
        self._tiles = CopyTable.empty()
        self._frames: npt.NDArray[np.int64] = np.empty((0, 5), np.int64)
        self._stream_of_tiles = TileStream(channel)

    def run(self) -> None:
        """Answer requests. Raises what ends the connection."""
        try:
            self._answer_all()
        finally:
            self._budget.leave(self._channel)

    def _answer_all(self) -> None:
        while True:
            request = next_request(self._channel, self._budget, Deadline(IDLE_SECONDS))
            try:
                if isinstance(request, RegisterTiles):
                    self._remember(request)
                    answer: Ready | Fail = Ready()
                elif isinstance(request, Start):
                    deadline = transfer_deadline(request.seconds)
                    with self._busy():
                        self._stream(request.version, deadline)
                    continue
                else:
                    raise ProtocolError(f"a reader does not say {type(request).__name__}")
            except (StaleSource, ProtocolError) as error:
                answer = Fail(*to_wire(error))
            send_request(self._channel, answer, Deadline(ANSWER_SECONDS))

    def _remember(self, want: RegisterTiles) -> None:
        self._frames = np.empty((0, 5), np.int64)
        tiles, counts = wanted_tiles(want, self._layout_digest, (len(self._payload),), FRAME_BYTES)
        self._tiles, self._frames = tiles, frames_of(counts, tiles.rows * tiles.row_bytes)

    def _stream(self, version: int, deadline: Deadline) -> None:
        stamp = self._header.require(version)
        channel = self._channel
        for sequence, (group, offset, first, last, nbytes) in enumerate(self._frames.tolist()):
            self._header.require_unchanged(stamp)
            header = FrameHeader(DATA, sequence, version, group, first - offset, last - offset, nbytes).pack()
            channel.send([header], deadline, more=True)
            self._stream_of_tiles.send(self._tiles, self._addresses, first, last, nbytes, deadline)
        # Whatever was overwritten since it was sent is caught here at the latest: a reader believes nothing before the end.
        self._header.require_unchanged(stamp)
        channel.send([FrameHeader(END, len(self._frames), version).pack()], deadline)


def wanted_tiles(
    want: RegisterTiles, layout_digest: str, regions: Sequence[int], largest: int
) -> tuple[CopyTable, npt.NDArray[np.int64]]:
    """The tiles that ``want`` asks for of ``regions`` (bytes of each), and how many each group has: checked, as a peer sent them.

    Raises :class:`~weightsync.errors.StaleSource` for another layout, and :class:`~weightsync.errors.ProtocolError` for tiles that
    leave their region or have more than ``largest`` bytes.
    """
    if want.layout_digest != layout_digest:
        raise StaleSource(f"this source has layout {layout_digest}, but the plan was made for {want.layout_digest}")
    if len(want.counts) % 8 or len(want.tiles) % 40 or len(want.tiles) // 40 > MAX_TILES or len(want.counts) // 8 > MAX_GROUPS:
        raise ProtocolError("the table of wanted tiles is too long or cut off")
    counts = np.frombuffer(want.counts, "<i8").astype(np.int64)
    table = np.frombuffer(want.tiles, "<i8").astype(np.int64).reshape(-1, 5)
    if np.any((counts < 0) | (counts > MAX_TILES)) or int(counts.sum()) != len(table):
        raise ProtocolError("the groups of wanted tiles do not add up to the table")
    if np.any((table[:, 0] < 0) | (table[:, 0] >= len(regions))):
        raise ProtocolError("a copy table names a memory region that does not exist")
    nowhere = np.zeros(len(table), np.int64)
    region, source, stride, rows, row_bytes = (np.ascontiguousarray(column) for column in table.T)
    tiles = CopyTable(region.astype(np.int32), source, stride, nowhere, nowhere, rows, row_bytes)
    check_tiles(tiles, regions)
    if np.any(rows * row_bytes > largest):
        raise ProtocolError(f"a wanted tile has more than {largest} bytes")
    return tiles, counts


def frames_of(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], most: int = FRAME_BYTES) -> npt.NDArray[np.int64]:
    """Frames in order, ``int64[frames, 5]``: group, index of the group's first tile, first tile, one past the last, bytes.

    A frame ends with the tile that reaches the next multiple of ``most`` within its group, so it may hold one tile more than that.
    """
    if not len(sizes):
        return np.empty((0, 5), np.int64)
    group = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    group_first = np.cumsum(counts) - counts
    ends = np.cumsum(sizes)
    before = (ends - sizes)[np.minimum(group_first, len(sizes) - 1)]  # bytes ahead of each group; unused for empty ones
    part = (ends - sizes - before[group]) // most
    first = np.concatenate(([0], np.flatnonzero((np.diff(group) != 0) | (np.diff(part) != 0)) + 1))
    last = np.append(first[1:], len(sizes))
    nbytes = ends[last - 1] - (ends - sizes)[first]
    frames: npt.NDArray[np.int64] = np.stack([group[first], group_first[group[first]], first, last, nbytes], axis=1)
    return frames
