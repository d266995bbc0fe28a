"""The reader of every broadcast transport: it asks its publisher, and joins the process group that the publisher names."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ClassVar

import msgspec
import numpy as np

from weightsync.arrays import Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    BroadcastBroken,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    WeightSyncError,
)
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.transports.broadcast.process_groups import ProcessGroup
from weightsync.transports.host.region import EMPTY
from weightsync.transports.net.channel import CONTROL, END, HEADER, Channel, FrameHeader
from weightsync.transports.net.connected_reader import ConnectedReader, Dial
from weightsync.transports.net.messages import (
    ANSWER_BYTES,
    ControlMessage,
    Fail,
    Messages,
    Ready,
    RegisterTiles,
    Start,
    decode_control,
    next_answer,
    reported,
    send_request,
    transfer_deadline,
    unless_failed,
)


class Warmup(ControlMessage, frozen=True):
    """Of ``nccl``, before anything is paused: let the group connect within ``seconds``; answered by :class:`JoinEpoch` and an end.

    Or by the end alone, where other readers want the same: with whom a group is made is known when they begin.
    """

    seconds: float


class JoinEpoch(ControlMessage, frozen=True):
    """Of ``collective`` and ``nccl``, to a :class:`Start`: the broadcast begins, to all readers in this epoch's group.

    A reader that is in another epoch's group leaves it and joins this one, as ``rank`` of ``size``, at ``port`` of the publisher.
    Buckets have at most ``buffer_bytes`` bytes, header included. The publisher gives the broadcast up after ``seconds``.
    """

    epoch: str
    rank: int
    size: int
    port: int
    buffer_bytes: int
    seconds: float


MESSAGES: Messages = msgspec.msgpack.Decoder(RegisterTiles | Start | Ready | Fail | Warmup | JoinEpoch)


LEAST_BUFFER, MOST_BUFFER = 2 << 20, 4 << 30
_WHY_SECONDS = 1.0  # how long the publisher has to say why a broadcast broke
_CLOSE_SECONDS = 5.0


def tiles_and_bytes(groups: Sequence[CopyTable]) -> tuple[Int64, Int64]:
    """Return the number of tiles of each group, and the bytes of each tile: what the publisher cuts into frames."""
    sizes = [tiles.rows * tiles.row_bytes for tiles in groups]
    return np.array([len(tiles) for tiles in groups], np.int64), np.concatenate(sizes) if sizes else np.empty(0, np.int64)


class Receipt(ABC):
    """One transfer that is being received. Not thread-safe, except :meth:`abort`."""

    @abstractmethod
    def read(self, group: int, tiles: CopyTable, deadline: Deadline, digests: UInt64 | None) -> None:
        """Put the bytes of ``tiles``, all of one group, in place."""

    @abstractmethod
    def frames(self) -> int:
        """Return the number of frames of the transfer. Raises :class:`~weightsync.errors.ProtocolError` if some were not read."""

    @abstractmethod
    def abort(self, error: WeightSyncError) -> None:
        """Wake threads that wait for bytes: nothing more comes. Never blocks."""

    @abstractmethod
    def ended(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the receipt's thread to end. Returns whether it has."""


class ReceivingWire(ABC):
    """A reader's end of one kind of process group, with its buffers."""

    warms_up: ClassVar[bool] = False
    """Whether a group is made while the reader prepares, since its first broadcast takes long."""

    join: Callable[..., ProcessGroup]
    """:func:`~weightsync.transports.broadcast.process_groups.init_custom_process_group` of the wire's backend."""

    @abstractmethod
    def make_room(self, groups: Sequence[CopyTable], buffer_bytes: int, peer: str) -> None:
        """Have buffers of this size for these tiles: the list that was given last means the same tiles.

        Raises :class:`~weightsync.errors.WeightSyncError` if they do not fit here.
        """

    @abstractmethod
    def receive(self, group: ProcessGroup, version: int, deadline: Deadline) -> Receipt:
        """Begin to receive a version through ``group``."""

    def warm_up(self, group: ProcessGroup, deadline: Deadline) -> None:  # noqa: B027 - only a wire that warms up
        """Take part in a first broadcast of one byte."""

    def accept(self, ready: Ready) -> None:  # noqa: B027 - only a wire that cares where the publisher's memory is
        """Look at the publisher's answer to the table of tiles.

        Raises :class:`~weightsync.errors.TransportUnavailable` for a publisher that cannot send to here.
        """

    @abstractmethod
    def release(self) -> None:
        """Give up the buffers and the tables of tiles."""


class _PeerWatch:
    """A thread that ends a transfer when the publisher goes away or reports a failure, when this end aborts, or at ``deadline``.

    Nothing else does: NCCL waits without limit, gloo for a reader that stopped, a store's client for a store that is gone.
    """

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        self.joining: Future[None] = Future()
        self._channel, self._deadline = channel, deadline
        self._receiving: tuple[ProcessGroup, Receipt] | None = None
        self._lock, self._failed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="weightsync-broadcast-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._channel.next_kind(self._deadline) == END:
                return
        except WeightSyncError:
            pass  # whoever receives finds out the same
        with self._lock:
            self._failed = True
        self.joining.set_result(None)
        self._end()

    def covers(self, group: ProcessGroup, receipt: Receipt) -> None:
        """End these too. They are ended at once if the transfer has ended meanwhile."""
        with self._lock:
            self._receiving, failed = (group, receipt), self._failed
        if failed:
            self._end()

    def _end(self) -> None:
        if self._receiving is not None:
            group, receipt = self._receiving
            group.close()
            receipt.abort(PeerLost("the publisher ended this broadcast"))

    def ended(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the publisher has said something, or is gone. Returns whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class BroadcastReader(ConnectedReader):
    """A :class:`~weightsync.transports.base.Reader` to which a publisher at ``host`` sends through a process group of ``wire``.

    Asks, and learns of failures, over its connection to the publisher. It closes the connection when it gives up a transfer: so the
    publisher notices, and with it the other readers.
    """

    _largest_tile = TILE_BYTES
    _messages = MESSAGES

    def __init__(self, dial: Dial, deadline: Deadline, host: str, wire: ReceivingWire) -> None:
        self._host, self._wire = host, wire
        self._group: ProcessGroup | None = None
        self._shared = False  # whether the group of the last transfer had other readers
        self._receipt: Receipt | None = None
        self._left: list[Receipt] = []  # of transfers that were given up, whose threads still ran
        self._watch: _PeerWatch | None = None
        self._version = EMPTY
        super().__init__(dial, deadline)

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        super().prepare(groups, layout_digest, deadline)
        if self._wire.warms_up and self._channel is not None:
            self._warm_up(self._channel, deadline)

    def _take_ready(self, ready: Ready) -> None:
        self._wire.accept(ready)

    def _warm_up(self, channel: Channel, deadline: Deadline) -> None:
        """Make buffers, tables and a connected group, if no other reader wants the same, before an engine pauses for it."""
        try:
            send_request(channel, Warmup(deadline.remaining("warming up")), deadline)
            if channel.next_kind(deadline) != END:
                self._wire.warm_up(
                    self._join(channel, next_answer(channel, ANSWER_BYTES, deadline, MESSAGES), EMPTY, deadline), deadline
                )
                self._wait_for_receipt(deadline)
            self._take_end(channel, 0, EMPTY, deadline)
        except WeightSyncError as error:
            raise self._why(channel, error, deadline) from error
        self._receipt = self._watch = None

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`. Returns when the group of readers is complete."""
        self._idle()
        channel = self._connected(deadline)
        answer = self._asked(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
        try:
            self._join(channel, answer, version, deadline)
        except WeightSyncError as error:
            raise self._why(channel, error, deadline) from error
        self._version = version

    def _join(self, channel: Channel, join: object, version: int, deadline: Deadline) -> ProcessGroup:
        """Join the group that the publisher names, unless this reader is in it, and begin to receive from it."""
        if not isinstance(join, JoinEpoch):
            raise ProtocolError(f"{channel.peer} answered {type(join).__name__} to the beginning of a transfer")
        if (
            not LEAST_BUFFER // 2 <= join.buffer_bytes <= MOST_BUFFER
            or not 0 < join.rank < join.size
            or not 0 < join.port < 1 << 16
        ):
            raise ProtocolError(f"{channel.peer} named an impossible group")
        limit = transfer_deadline(min(join.seconds, deadline.remaining("joining a group")))
        self._shared = join.size > 2
        self._wire.make_room(self._groups, join.buffer_bytes, channel.peer)
        watch = self._watch = _PeerWatch(channel, limit)
        if self._group is not None and (self._group.name != join.epoch or self._group.closed):
            self._drop_group()
        if self._group is None:
            interface = str(channel.socket.getsockname()[0])
            self._group = self._wire.join(
                join.rank, join.size, join.epoch, limit, address=self._host, port=join.port, interface=interface,
                joining=watch.joining,
            )  # fmt: skip
        self._receipt = self._wire.receive(self._group, version, limit)
        watch.covers(self._group, self._receipt)
        return self._group

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        channel, receipt = self._under_way(self._receipt)
        self._check_group(group, len(self._groups))
        try:
            deadline.remaining(f"reading group {group}")
            receipt.read(group, self._groups[group], deadline, digests)
        except WeightSyncError as error:
            raise self._why(channel, error, deadline) from error
        except BaseException:
            self._drop()
            raise

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, receipt = self._under_way(self._receipt)
        try:
            frames = receipt.frames()
            self._wait_for_receipt(deadline)
            self._take_end(channel, frames, self._version, deadline)
        except BroadcastBroken:
            self._leave_transfer()
            raise
        except BaseException:
            self._drop()
            raise
        self._receipt = self._watch = None

    def _wait_for_receipt(self, deadline: Deadline) -> None:
        for waiting in (self._receipt, self._watch):
            if waiting is not None and not waiting.ended(deadline.remaining("ending the transfer")):
                raise DeadlineExceeded(f"a broadcast did not end within {deadline.seconds:g} s")

    def _why(self, channel: Channel, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """Return what the publisher says of a broadcast that broke, else ``error``. Leaves the group.

        If other readers broke it, and the publisher says so, the connection stays for the next request.
        """
        cause, stays = error, isinstance(error, BroadcastBroken)
        if self._aborted:
            cause, stays = Aborted("the transfer was aborted"), False
        elif stays:  # it has said so already
            pass
        elif isinstance(error, PeerLost) or (isinstance(error, DeadlineExceeded) and deadline.left):
            try:
                if self._watch is not None:
                    self._watch.ended(_WHY_SECONDS)
                next_answer(channel, ANSWER_BYTES, Deadline(_WHY_SECONDS), MESSAGES)
            except WeightSyncError as answer:
                if reported(answer) or isinstance(answer, PeerLost | Aborted):
                    cause, stays = answer, isinstance(answer, BroadcastBroken)
                elif self._shared:  # it is there, and has noticed nothing
                    cause = BroadcastBroken(str(error))
        if stays:
            self._leave_transfer()
        else:
            self._drop()
        return cause

    def _take_end(self, channel: Channel, frames: int, version: int, deadline: Deadline) -> None:
        """Receive that all ``frames`` were sent, and that the publisher held ``version`` throughout."""
        header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
        if header.kind == CONTROL:
            unless_failed(decode_control(channel, header, ANSWER_BYTES, deadline, MESSAGES))
        if header[:3] != (END, frames, version):
            raise ProtocolError(f"{channel.peer} was not at the end of its transfer")

    def _unfinished(self) -> bool:
        return self._receipt is not None

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _drop(self) -> None:
        if self._watch is not None and self._channel is not None:
            self._channel.abort()  # the publisher notices, and ends the broadcast
        self._leave_transfer()
        super()._drop()

    def _leave_transfer(self) -> None:
        receipt, self._receipt = self._receipt, None
        if receipt is not None:
            receipt.abort(Aborted("the transfer was given up"))
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.ended(_CLOSE_SECONDS)  # before the channel is used again, or closed
        self._drop_group()
        self._left = [earlier for earlier in self._left if not earlier.ended(0)]
        if receipt is not None and not receipt.ended(_CLOSE_SECONDS if self._closed else 0):
            self._left.append(receipt)
            self._wire.release()  # a broadcast still writes to the buffers

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        super().abort()
        receipt = self._receipt
        if receipt is not None:
            receipt.abort(Aborted("the transfer was aborted"))

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        super().close()
        self._wire.release()
        deadline = Deadline(_CLOSE_SECONDS)
        for receipt in self._left:
            receipt.ended(deadline.left)
        self._left.clear()
