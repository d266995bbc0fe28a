"""The reader of a stream: it puts what arrives where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from weightsync.arrays import Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.net.channel import CONTROL, DATA, END, HEADER, Channel, FrameHeader
from weightsync.transports.net.connected_reader import ConnectedReader, Dial
from weightsync.transports.net.frames import MAX_FRAME_BYTES
from weightsync.transports.net.messages import ANSWER_BYTES, Start, decode_control, reported, send_request, unless_failed
from weightsync.transports.tcp.tile_stream import TileStream


class _Arriving:
    """Where a running transfer is."""

    def __init__(self, version: int, header: FrameHeader, tiles: TileStream) -> None:
        self.version = version
        self.header = header  # of the frame that comes next
        self.tiles = tiles
        self.sequence = 0


class StreamReader(ConnectedReader):
    """A :class:`~weightsync.transports.base.Reader` to which the publisher streams. Holds a :class:`TileStream`."""

    def __init__(self, dial: Dial, deadline: Deadline) -> None:
        self._stream: _Arriving | None = None
        self._ends: list[Int64] = []
        self._header = bytearray(HEADER.size)
        super().__init__(dial, deadline)

    def _unfinished(self) -> bool:
        return self._stream is not None

    def _drop(self) -> None:
        self._stream = None
        super()._drop()

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        super().prepare(groups, layout_digest, deadline)
        self._ends = [np.cumsum(tiles.rows * tiles.row_bytes) for tiles in self._groups]

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self._idle()
        channel = self._connected(deadline)
        with self._in_step():
            send_request(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
            header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
            if header.kind == CONTROL:
                self._raise_failure(channel, header, deadline)
        self._stream = _Arriving(version, header, TileStream(channel))

    def _raise_failure(self, channel: Channel, header: FrameHeader, deadline: Deadline) -> None:
        answer = unless_failed(decode_control(channel, header, ANSWER_BYTES, deadline))
        raise ProtocolError(f"{channel.peer} sent {type(answer).__name__} instead of data")

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        channel, stream = self._under_way(self._stream)
        self._check_group(group, len(self._groups))
        with self._in_step():
            deadline.remaining(f"reading group {group}")
            done, wanted = 0, len(self._groups[group])
            while done < wanted:
                self._check_frame(channel, stream, group, done, deadline)
                done = stream.header.last
                self._receive(channel, stream, deadline, digests)

    def _check_frame(self, channel: Channel, stream: _Arriving, group: int, done: int, deadline: Deadline) -> None:
        header = stream.header
        if header.kind == CONTROL:
            self._raise_failure(channel, header, deadline)
        ends = self._ends[group]
        due = (DATA, stream.sequence, stream.version, group, done)
        if header[:5] != due or not done < header.last <= len(ends):
            raise ProtocolError(
                f"{channel.peer} sent frame {tuple(header)} where (kind, sequence, version, group, tile) {due} was due"
            )
        nbytes = int(ends[header.last - 1]) - (int(ends[done - 1]) if done else 0)
        if header.nbytes != nbytes or nbytes > MAX_FRAME_BYTES:
            raise ProtocolError(f"{channel.peer} sent a frame of {header.nbytes} bytes for tiles of {nbytes}")

    def _receive(self, channel: Channel, stream: _Arriving, deadline: Deadline, digests: UInt64 | None) -> None:
        """Take in the frame whose header was read, and the header that follows (an end at least)."""
        _, _, _, group, first, last, nbytes = stream.header
        stream.tiles.receive(self._groups[group], first, last, nbytes, deadline, digests)
        channel.receive_into([memoryview(self._header)], deadline)
        stream.header = FrameHeader.unpack(self._header)
        stream.sequence += 1

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, stream = self._under_way(self._stream)
        with self._in_step():
            deadline.remaining("ending the transfer")
            if stream.header.kind == CONTROL:
                self._raise_failure(channel, stream.header, deadline)
            if stream.header[:3] != (END, stream.sequence, stream.version):
                raise ProtocolError(f"{channel.peer} was not at the end of its transfer: not every group was read, or in order")
        self._stream = None

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """End the transfer at an error, and drop the connection, unless the publisher itself reported the error.

        Then its stream ended there, and the connection can be used again.
        """
        try:
            yield
        except BaseException as error:
            self._stream = None
            if not reported(error):
                self._drop()
            raise
