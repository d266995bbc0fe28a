"""The publisher's end of ``tcp``: keeps the tiles that a reader registered, and streams them from the region."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, StaleSource, to_wire
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import DATA, END, Channel, FrameHeader
from weightsync.transports.net.frames import frames_of, wanted_tiles
from weightsync.transports.net.messages import (
    ANSWER_SECONDS,
    IDLE_SECONDS,
    Fail,
    Ready,
    RegisterTiles,
    Start,
    TableBudget,
    next_request,
    send_request,
    transfer_deadline,
)
from weightsync.transports.net.tile_limits import FRAME_BYTES
from weightsync.transports.tcp.tile_stream import TileStream

__all__ = ["Sender"]


class Sender:
    """Serves one authenticated reader of ``region`` until it goes away. Holds a :class:`TileStream`.

    ``budget`` is what all readers of the region share; ``busy`` gives a context in which each transfer runs.
    """

    def __init__(
        self, region: PublishedRegion, channel: Channel, budget: TableBudget, busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._channel, self._budget, self._busy = channel, budget, busy
        self._layout_digest = region.layout_digest
        self._header = region.header  # with the payload, keeps the memory mapped whatever happens to the region
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
