"""A reader that asks its publisher over a connection: it says once what it wants, and connects again if it must."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, AuthenticationError, PeerLost, ProtocolError, TransportError, WeightSyncError
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import CopyTable, joined_tables
from weightsync.transports.base import BlockingReader
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.frames import FRAME_BYTES, cut_tiles
from weightsync.transports.net.messages import (
    ANSWER_BYTES,
    COMMON,
    MAX_GROUPS,
    MAX_TILES,
    ControlMessage,
    Messages,
    Ready,
    RegisterTiles,
    next_answer,
    reported,
    send_request,
)

Dial = Callable[[Callable[[Channel], None], Deadline], Channel]
"""Opens an authenticated channel, and gives it to its first argument as soon as it has a socket, so that it can be aborted."""

_LARGEST = 1 << 62
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ConnectedReader(BlockingReader):
    """Base of readers to which the publisher sends. Owns the connection and the table of wanted tiles.

    A transfer that ended early leaves unread bytes on its connection, so the connection is closed (the publisher stops sending at
    once), and the next ``prepare`` or ``begin`` makes a new one.
    """

    _largest_tile = FRAME_BYTES
    _messages: Messages = COMMON

    def __init__(self, dial: Dial, deadline: Deadline) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._aborted = False
        self._closed = False
        self._groups: list[CopyTable] = []
        self._want: RegisterTiles | None = None
        self._connect(deadline)

    def _adopt(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._aborted or self._closed:
                channel.abort()

    def _connect(self, deadline: Deadline) -> Channel:
        with OnFailure(self._drop):
            return self._dial(self._adopt, deadline)

    def _drop(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()

    def _idle(self) -> None:
        """Clear an abort and the rest of an earlier transfer."""
        if self._closed:
            raise PeerLost("this source is closed")
        self._aborted = False
        if self._unfinished() or (self._channel is not None and self._channel.aborted):
            self._drop()

    @abstractmethod
    def _unfinished(self) -> bool:
        """Whether something is left of a transfer that ended early."""

    def _under_way(self, transfer: T | None) -> tuple[Channel, T]:
        """The channel, and the transfer that was begun on it."""
        if self._aborted:
            self._drop()
            raise Aborted("the transfer was aborted")
        if self._channel is None or transfer is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return self._channel, transfer

    def _connected(self, deadline: Deadline) -> Channel:
        """A channel whose publisher knows what is wanted; connects again if the old one is gone."""
        channel = self._channel
        if channel is not None and channel.peer_lives():
            return channel
        self._drop()
        try:
            channel = self._connect(deadline)
        except (TransportError, AuthenticationError) as error:
            # Sent to others, the reason would reveal what listens at an address that they gave.
            _log.warning("a source cannot be reached any more: %a", str(error))
            raise PeerLost("the source went away and cannot be reached any more: this reader's own log says why") from error
        if self._want is not None:
            self._send_request(channel, self._want, deadline)
        return channel

    def _send_request(self, channel: Channel, want: RegisterTiles, deadline: Deadline) -> None:
        answer = self._asked(channel, want, deadline)
        if not isinstance(answer, Ready):
            self._drop()
            raise ProtocolError(f"{channel.peer} answered {type(answer).__name__} to a table of tiles")
        self._take_ready(answer)

    def _asked(self, channel: Channel, request: ControlMessage, deadline: Deadline, most: int = ANSWER_BYTES) -> ControlMessage:
        """What the publisher answers, unless that is its failure, which is raised; the connection stays."""
        try:
            send_request(channel, request, deadline)
            return next_answer(channel, most, deadline, self._messages)
        except WeightSyncError as error:
            if not reported(error):
                self._drop()
            raise

    def _take_ready(self, ready: Ready) -> None:
        """Take what else the publisher sent when it was ready."""

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._idle()
        self._want, self._groups = None, []
        for tiles in groups:
            # Before any work; which regions there are, and how large, only the publisher knows.
            check_tiles(replace(tiles, region=np.zeros_like(tiles.region)), (_LARGEST,))
        cut = [cut_tiles(tiles, self._largest_tile) for tiles in groups]
        if len(cut) > MAX_GROUPS or sum(map(len, cut)) > MAX_TILES:
            raise ProtocolError(f"more than {MAX_GROUPS} groups or {MAX_TILES} tiles for one source: split the plan")
        wanted = joined_tables(cut)[:, [0, 1, 2, 5, 6]]  # region, source, source stride, rows, row bytes
        counts = np.array([len(tiles) for tiles in cut], "<i8")
        want = RegisterTiles(layout_digest, counts.tobytes(), wanted.astype("<i8").tobytes())
        self._send_request(self._connected(deadline), want, deadline)
        self._want, self._groups = want, cut

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
