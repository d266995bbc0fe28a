"""The reader's half of a carried transfer: say what is wanted, and put what arrives where it belongs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, AuthenticationError, PeerLost, ProtocolError, TransportError, WeightSyncError, from_wire
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import Tiles
from weightsync.transports.base import BlockingReader
from weightsync.transports.net.channel import CONTROL, DATA, END, HEADER, Channel, FrameHeader
from weightsync.transports.net.requests import (
    ANSWER_BYTES,
    MAX_GROUPS,
    Fail,
    Ready,
    Request,
    Start,
    Want,
    ask,
    decode_control,
    next_control,
)
from weightsync.transports.net.tile_limits import FRAME_BYTES, MAX_FRAME_BYTES, MAX_TILES, cut_tiles
from weightsync.transports.tcp.tile_stream import TileStream

__all__ = ["StreamReader"]

_LARGEST = 1 << 62
_log = logging.getLogger(__name__)


class _Stream:
    """Where a running transfer is."""

    def __init__(self, version: int, header: FrameHeader, tiles: TileStream) -> None:
        self.version = version
        self.header = header  # of the frame that comes next
        self.tiles = tiles
        self.sequence = 0


class StreamReader(BlockingReader):
    """A :class:`~weightsync.transports.base.Reader` to which the owner sends. Holds a bucket of 256 KiB.

    ``dial`` opens an authenticated channel and gives it to its argument as soon as it has a socket, so that a connection that is
    being made can be aborted, too. A transfer that ended early leaves unread bytes on its connection, so the connection is closed
    (the owner stops sending at once) and the next ``prepare`` or ``begin`` makes a new one.
    """

    _largest_tile = FRAME_BYTES

    def __init__(self, dial: Callable[[Callable[[Channel], None], Deadline], Channel], deadline: Deadline) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._aborted = False
        self._closed = False
        self._stream: _Stream | None = None
        self._groups: list[Tiles] = []
        self._ends: list[npt.NDArray[np.int64]] = []
        self._want: Want | None = None
        self._header = bytearray(HEADER.size)
        self._connect(deadline)

    # Connection.

    def _adopt(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._aborted or self._closed:
                channel.abort()

    def _connect(self, deadline: Deadline) -> Channel:
        try:
            return self._dial(self._adopt, deadline)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        with self._lock:
            channel, self._channel, self._stream = self._channel, None, None
            if channel is not None:
                channel.close()

    def _idle(self) -> None:
        """Forget an abort and whatever is left of an earlier transfer."""
        if self._closed:
            raise PeerLost("this source is closed")
        self._aborted = False
        if self._stream is not None or (self._channel is not None and self._channel.aborted):
            self._drop()

    def _connected(self, deadline: Deadline) -> Channel:
        """A channel whose owner knows what is wanted; connects again if the old one is gone."""
        channel = self._channel
        if channel is not None and channel.peer_lives():
            return channel
        self._drop()
        try:
            channel = self._connect(deadline)
        except (TransportError, AuthenticationError) as error:
            # Told to others, the reason would say what listens at an address that they gave.
            _log.warning("a trainer rank cannot be reached any more: %a", str(error))
            raise PeerLost("the trainer rank went away and cannot be reached any more: this reader's own log says why") from error
        if self._want is not None:
            self._send_want(channel, self._want, deadline)
        return channel

    def _send_want(self, channel: Channel, want: Want, deadline: Deadline) -> None:
        answer = self._asked(channel, want, deadline)
        if not isinstance(answer, Ready):
            self._drop()
            raise ProtocolError(f"{channel.peer} answered {type(answer).__name__} to a table of tiles")
        self._take_ready(answer)

    def _asked(self, channel: Channel, request: Request, deadline: Deadline) -> Request:
        """What the owner answers, unless that is its failure, which is raised; the connection stays."""
        try:
            ask(channel, request, deadline)
            answer = next_control(channel, ANSWER_BYTES, deadline)
        except WeightSyncError:
            self._drop()
            raise
        if isinstance(answer, Fail):
            raise from_wire(answer.kind, answer.message)
        return answer

    def _take_ready(self, ready: Ready) -> None:
        """What else the owner said when it was ready."""

    # The contract.

    def prepare(self, groups: Sequence[Tiles], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._idle()
        self._want, self._groups = None, []
        for tiles in groups:
            # Before any work; which regions there are, and how large, only the owner knows.
            check_tiles(replace(tiles, region=np.zeros_like(tiles.region)), (_LARGEST,))
        cut = [cut_tiles(tiles, self._largest_tile) for tiles in groups]
        if len(cut) > MAX_GROUPS or sum(map(len, cut)) > MAX_TILES:
            raise ProtocolError(f"more than {MAX_GROUPS} groups or {MAX_TILES} tiles for one source: split the plan")
        columns = [
            np.concatenate([np.asarray(getattr(tiles, name), "<i8") for tiles in cut] or [np.empty(0, "<i8")])
            for name in ("region", "source", "source_stride", "rows", "row_bytes")
        ]
        counts = np.array([len(tiles) for tiles in cut], "<i8")
        want = Want(layout_digest, counts.tobytes(), np.stack(columns, axis=1).astype("<i8").tobytes())
        self._send_want(self._connected(deadline), want, deadline)
        self._want, self._groups = want, cut
        self._ends = [np.cumsum(tiles.rows * tiles.row_bytes) for tiles in cut]

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self._idle()
        channel = self._connected(deadline)
        try:
            ask(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
            header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
            if header.kind == CONTROL:
                self._raise_failure(channel, header, deadline)
        except (WeightSyncError, OSError) as error:
            if not _in_step(error):
                self._drop()
            raise
        self._stream = _Stream(version, header, TileStream(channel))

    def _raise_failure(self, channel: Channel, header: FrameHeader, deadline: Deadline) -> None:
        answer = decode_control(channel, header, ANSWER_BYTES, deadline)
        if not isinstance(answer, Fail):
            raise ProtocolError(f"{channel.peer} sent {type(answer).__name__} instead of data")
        error = from_wire(answer.kind, answer.message)
        error.add_note(_TOLD)
        raise error

    def _running(self) -> tuple[Channel, _Stream]:
        if self._aborted:
            self._drop()
            raise Aborted("the transfer was aborted")
        if self._channel is None or self._stream is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return self._channel, self._stream

    def read(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        channel, stream = self._running()
        if not 0 <= group < len(self._groups):
            raise ProtocolError(f"group {group} was not prepared: there are {len(self._groups)}")
        try:
            deadline.remaining(f"reading group {group}")
            done, wanted = 0, len(self._groups[group])
            while done < wanted:
                self._check_frame(channel, stream, group, done, deadline)
                done = stream.header.last
                self._receive(channel, stream, deadline, digests)
        except BaseException as error:
            self._stream = None
            if not _in_step(error):
                self._drop()
            raise

    def _check_frame(self, channel: Channel, stream: _Stream, group: int, done: int, deadline: Deadline) -> None:
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

    def _receive(self, channel: Channel, stream: _Stream, deadline: Deadline, digests: npt.NDArray[np.uint64] | None) -> None:
        """Take in the frame whose header was read, and the header that follows (an end at least)."""
        _, _, _, group, first, last, nbytes = stream.header
        stream.tiles.receive(self._groups[group], first, last, nbytes, deadline, digests)
        channel.receive_into([memoryview(self._header)], deadline)
        stream.header = FrameHeader.unpack(self._header)
        stream.sequence += 1

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, stream = self._running()
        try:
            deadline.remaining("ending the transfer")
            if stream.header.kind == CONTROL:
                self._raise_failure(channel, stream.header, deadline)
            if stream.header[:3] != (END, stream.sequence, stream.version):
                raise ProtocolError(f"{channel.peer} was not at the end of its transfer: not every group was read, or in order")
        except BaseException as error:
            self._stream = None
            if not _in_step(error):
                self._drop()
            raise
        self._stream = None

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        self._aborted = True
        with self._lock:
            if self._channel is not None:
                self._channel.abort()

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        self._closed = True
        self._drop()
        self._groups, self._want = [], None


_TOLD = "told by the owner"


def _in_step(error: BaseException) -> bool:
    """Whether the owner itself reported ``error``: then its stream ended there, and the connection can be used again."""
    return _TOLD in getattr(error, "__notes__", ())
