"""What reader and owner say to each other in ``CONTROL`` frames: MessagePack structs, bounded before they are decoded."""

from __future__ import annotations

import math
import threading

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, to_wire
from weightsync.protocol.messages import UNREADABLE, Memory
from weightsync.transports.net.channel import CONTROL, HEADER, Channel, FrameHeader
from weightsync.transports.net.tile_limits import MAX_TILES

__all__ = [
    "ANSWER_BYTES",
    "ANSWER_SECONDS",
    "IDLE_SECONDS",
    "MAX_GROUPS",
    "REQUEST_BYTES",
    "DescribeMemory",
    "Fail",
    "JoinEpoch",
    "MemoryDescription",
    "Pack",
    "Ready",
    "RegisterTiles",
    "Request",
    "Start",
    "TableBudget",
    "Warmup",
    "decode_control",
    "next_control",
    "next_request",
    "send_request",
    "transfer_deadline",
]

MAX_GROUPS = 1 << 20
REQUEST_BYTES = 40 * MAX_TILES + 8 * MAX_GROUPS + 4096
"""Most bytes of a request that an owner reads, from a reader that has proved to know the key."""
ANSWER_BYTES = 1 << 16
IDLE_SECONDS = 3600.0
"""A reader that asks for nothing so long is cut off; it connects again when it wants something."""
ANSWER_SECONDS = 10.0
"""How long a reader has to take a short answer."""
_LONGEST_SECONDS = 3600.0
_SMALL_BYTES = 4096
"""A request of at most this many bytes is no table."""
_LEAST_ROOM = 256 << 20
_SCRATCH_BYTES = 1 << 16


class _Frame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class RegisterTiles(_Frame, frozen=True):
    """The tiles that will be wanted, for a plan made for this layout; answered by :class:`Ready` or :class:`Fail`.

    ``counts`` holds the tiles of each group (int64, little-endian), ``tiles`` a row of five int64 for each tile: region, source,
    source stride, rows, row bytes.
    """

    layout_digest: str
    counts: bytes
    tiles: bytes


class Start(_Frame, frozen=True):
    """Send all groups in order from this version within ``seconds``; answered by data frames and an end, or :class:`Fail`."""

    version: int
    seconds: float


class Warmup(_Frame, frozen=True):
    """Of ``nccl``, before anything is paused: let the group connect within ``seconds``; answered by :class:`JoinEpoch` and an end.

    Or by the end alone, where other readers want the same: with whom a group is made is known when they begin.
    """

    seconds: float


class Ready(_Frame, frozen=True):
    """The tiles are inside the shelf and remembered. ``device`` names the GPU that will send them, where one does."""

    device: str = ""


class Fail(_Frame, frozen=True):
    """The request failed, or the stream ends here; an error as :func:`weightsync.errors.to_wire` gives it."""

    kind: str
    message: str


class JoinEpoch(_Frame, frozen=True):
    """Of ``collective`` and ``nccl``, to a :class:`Start`: the broadcast begins, to all readers in this epoch's group.

    A reader that is in another epoch's group leaves it and joins this one, as ``rank`` of ``size``, at ``port`` of the owner.
    Buckets have at most ``buffer_bytes`` bytes, header included. The owner gives the broadcast up after ``seconds``.
    """

    epoch: str
    rank: int
    size: int
    port: int
    buffer_bytes: int
    seconds: float


class DescribeMemory(_Frame, frozen=True):
    """Of ``nixl``: asks where the publisher's memory lies; answered by :class:`MemoryDescription` or :class:`Fail`."""


class MemoryDescription(_Frame, frozen=True):
    """Where a publisher's memory lies, and what a NIXL agent needs to read it.

    Attributes:
        agent: Metadata of the publisher's agent.
        memory: Memory of the regions; the header page is always in host memory.
        device: CUDA device of the regions.
        exports: How often the publisher has exported its memory.
        layout_digest: Layout of the regions.
        header: Address of the header page.
        regions: Address and bytes of each region, little-endian ``int64[regions, 2]``.
        buffer_bytes: Most bytes of a frame.
        buffers: Address of each of this reader's staging buffers, if it registered tiles.
    """

    agent: bytes
    memory: Memory
    device: int
    exports: int
    layout_digest: str
    header: int
    regions: bytes
    buffer_bytes: int
    buffers: tuple[int, ...]


class Pack(_Frame, frozen=True):
    """Of ``nixl``: pack this frame of the registered tiles into its staging buffer; answered by :class:`Ready` or :class:`Fail`."""

    frame: int


Request = RegisterTiles | Start | Warmup | Ready | Fail | JoinEpoch | DescribeMemory | MemoryDescription | Pack

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def transfer_deadline(seconds: float) -> Deadline:
    """The deadline of a transfer within ``seconds``, as a reader asks for it: from a millisecond to an hour."""
    if math.isnan(seconds):
        raise ProtocolError("a transfer within no number of seconds")
    return Deadline(min(max(seconds, 1e-3), _LONGEST_SECONDS))


def send_request(channel: Channel, request: Request, deadline: Deadline) -> None:
    """Send one request or answer."""
    body = msgspec.msgpack.encode(request)
    channel.send([FrameHeader(CONTROL, nbytes=len(body)).pack(), body], deadline)


def decode_control(channel: Channel, header: FrameHeader, most: int, deadline: Deadline) -> Request:
    """The body of a control frame whose header was read. Raises :class:`~weightsync.errors.ProtocolError` beyond ``most`` bytes."""
    if header.kind != CONTROL or header.nbytes > most:
        raise ProtocolError(f"{channel.peer} sent frame kind {header.kind} of {header.nbytes} bytes where a short message was due")
    try:
        return _decoder.decode(channel.receive(header.nbytes, deadline))
    except UNREADABLE as error:
        raise ProtocolError(f"{channel.peer} sent a message that cannot be read: {error}") from None


def next_control(channel: Channel, most: int, deadline: Deadline) -> Request:
    """The next frame, which must be a control frame."""
    return decode_control(channel, FrameHeader.unpack(channel.receive(HEADER.size, deadline)), most, deadline)


class TableBudget:
    """Bytes of tables of tiles that one owner takes from all its readers together, for a shelf of ``nbytes`` bytes.

    At least 256 MiB, which is 6.7 million tiles, and an eighth of the shelf. (What an owner remembers has twice the size.) Without
    it a thousand readers, each within its own limits, could fill the memory of a trainer. Any thread.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(_LEAST_ROOM, nbytes // 8)
        self._lock = threading.Lock()
        self._taken: dict[Channel, int] = {}

    def take(self, channel: Channel, nbytes: int) -> None:
        """Take room for the reader's new table, instead of its last. Raises :class:`~weightsync.errors.ProtocolError`."""
        with self._lock:
            self._taken.pop(channel, None)
            taken = sum(self._taken.values())
            if taken + nbytes > self.nbytes:
                raise ProtocolError(
                    f"a table of tiles of {nbytes:,} bytes does not fit beside the {taken:,} bytes of the source's other "
                    f"readers: it takes {self.nbytes:,} in all. Spread the model over more ranks, or let readers of its "
                    "own host use shared_memory"
                )
            self._taken[channel] = nbytes

    def leave(self, channel: Channel) -> None:
        """The reader is gone."""
        with self._lock:
            self._taken.pop(channel, None)


def next_request(channel: Channel, budget: TableBudget, deadline: Deadline) -> Request:
    """What a reader asks for next, if there is ``budget`` for it: that is looked at before anything is received.

    Raises :class:`~weightsync.errors.ProtocolError` for an invalid request. A reader for which there was no room gets that as its
    answer, and may ask for something else.
    """
    while True:
        header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
        if header.kind == CONTROL and _SMALL_BYTES < header.nbytes <= REQUEST_BYTES:
            try:
                budget.take(channel, header.nbytes)
            except ProtocolError as error:
                _discard(channel, header.nbytes, deadline)
                send_request(channel, Fail(*to_wire(error)), deadline)
                continue
        return decode_control(channel, header, REQUEST_BYTES, deadline)


def _discard(channel: Channel, nbytes: int, deadline: Deadline) -> None:
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
    while nbytes:
        part = scratch[: min(nbytes, len(scratch))]
        channel.receive_into([part], deadline)
        nbytes -= len(part)
