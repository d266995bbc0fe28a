"""A reader that takes part in broadcasts: it asks its owner, and joins the process group that the owner names."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, PeerLost, ProtocolError, WeightSyncError, from_wire
from weightsync.tensors.copy_table import TILE_BYTES
from weightsync.transports.broadcast.buffer_config import LEAST_BUFFER, MOST_BUFFER, BufferSettings
from weightsync.transports.broadcast.process_groups import ProcessGroup
from weightsync.transports.net.channel import CONTROL, END, HEADER, Channel, FrameHeader
from weightsync.transports.net.connected_reader import ConnectedReader, Dial
from weightsync.transports.net.requests import ANSWER_BYTES, Fail, JoinEpoch, Start, decode_control, next_control

__all__ = ["JoiningReader"]

_WHY_SECONDS = 1.0  # how long the owner has to say why a broadcast broke


class JoiningReader(ConnectedReader):
    """A :class:`~weightsync.transports.base.Reader` that is sent to through a process group.

    Asks, and learns of failures, over its connection to the owner, who is at ``host``; the connection goes when a transfer is given
    up, by which the owner and with it the other readers notice.
    """

    _largest_tile = TILE_BYTES

    def __init__(self, dial: Dial, deadline: Deadline, host: str, buffers: BufferSettings) -> None:
        self._host, self._settings = host, buffers
        self._group: ProcessGroup | None = None
        super().__init__(dial, deadline)

    @abstractmethod
    def _enter(self, channel: Channel, join: JoinEpoch, deadline: Deadline) -> ProcessGroup:
        """Join the group."""

    @abstractmethod
    def _make_room(self, channel: Channel, buffer_bytes: int) -> None:
        """Have buffers of this size. Raises :class:`~weightsync.errors.WeightSyncError` if they do not fit here."""

    @abstractmethod
    def _begun(self, channel: Channel, group: ProcessGroup, version: int, deadline: Deadline) -> None:
        """A transfer begins, through ``group``."""

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`. Returns when the group of readers is complete."""
        self._idle()
        channel = self._connected(deadline)
        answer = self._asked(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
        try:
            if not isinstance(answer, JoinEpoch):
                raise ProtocolError(f"{channel.peer} answered {type(answer).__name__} to the beginning of a transfer")
            group = self._join(channel, answer, deadline)
            self._begun(channel, group, version, deadline)
        except WeightSyncError as error:
            raise self._why(channel, error) from error

    def _join(self, channel: Channel, join: JoinEpoch, deadline: Deadline) -> ProcessGroup:
        if (
            not LEAST_BUFFER // 2 <= join.buffer_bytes <= MOST_BUFFER
            or not 0 < join.rank < join.size
            or not 0 < join.port < 1 << 16
        ):
            raise ProtocolError(f"{channel.peer} named an impossible group")
        self._make_room(channel, join.buffer_bytes)
        group = self._group
        if group is not None and (group.name != join.epoch or group.closed):
            self._drop_group()
            group = None
        if group is None:
            group = self._enter(channel, join, deadline)
        self._group = group
        return group

    def _wanted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The number of tiles of each group, and the bytes of each tile: what the owner cuts into frames."""
        counts = np.array([len(tiles) for tiles in self._groups], np.int64)
        sizes = [tiles.rows * tiles.row_bytes for tiles in self._groups]
        return counts, np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    def _channel_in_use(self) -> Channel:
        """The connection of a transfer that runs."""
        if self._aborted:
            self._drop()
            raise Aborted("the transfer was aborted")
        if self._channel is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return self._channel

    def _why(self, channel: Channel, error: WeightSyncError) -> WeightSyncError:
        """What the owner says of a broadcast that broke, else ``error``; lets go of everything."""
        cause = error
        if self._aborted:
            cause = Aborted("the transfer was aborted")
        elif isinstance(error, PeerLost):
            try:
                answer = next_control(channel, ANSWER_BYTES, Deadline(_WHY_SECONDS))
                if isinstance(answer, Fail):
                    cause = from_wire(answer.kind, answer.message)
            except WeightSyncError as silence:
                if isinstance(silence, PeerLost):
                    cause = silence
        self._drop()
        return cause

    def _take_end(self, channel: Channel, frames: int, version: int, deadline: Deadline) -> None:
        """Hear that all ``frames`` were sent, and that the owner held ``version`` throughout."""
        header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
        if header.kind == CONTROL:
            answer = decode_control(channel, header, ANSWER_BYTES, deadline)
            if isinstance(answer, Fail):
                raise from_wire(answer.kind, answer.message)
        if header[:3] != (END, frames, version):
            raise ProtocolError(f"{channel.peer} was not at the end of its transfer")
