"""What reader and owner say to each other in ``CONTROL`` frames: MessagePack structs, bounded before they are decoded."""

from __future__ import annotations

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.messages import UNREADABLE
from weightsync.transports.frames import CONTROL, HEADER, Channel, FrameHeader
from weightsync.transports.runs import MAX_TILES

__all__ = [
    "ANSWER_BYTES",
    "MAX_GROUPS",
    "REQUEST_BYTES",
    "Fail",
    "Join",
    "Meet",
    "Ready",
    "Request",
    "Start",
    "Want",
    "ask",
    "decode_control",
    "next_control",
]

MAX_GROUPS = 1 << 20
REQUEST_BYTES = 40 * MAX_TILES + 8 * MAX_GROUPS + 4096
"""Most bytes of a request that an owner reads, from a reader that has proved to know the key."""
ANSWER_BYTES = 1 << 16


class _Struct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Want(_Struct, frozen=True):
    """The tiles that will be wanted, for a plan made for this layout; answered by :class:`Ready` or :class:`Fail`.

    ``counts`` holds the tiles of each group (int64, little-endian), ``tiles`` a row of five int64 for each tile: region, source,
    source stride, rows, row bytes.
    """

    layout_digest: str
    counts: bytes
    tiles: bytes


class Start(_Struct, frozen=True):
    """Send all groups in order from this version within ``seconds``; answered by data frames and an end, or :class:`Fail`."""

    version: int
    seconds: float


class Meet(_Struct, frozen=True):
    """Of ``nccl``, before anything is paused: let the group connect within ``seconds``; answered by :class:`Join` and an end.

    Or by the end alone, where other readers want the same: with whom a group is made is known when they begin.
    """

    seconds: float


class Ready(_Struct, frozen=True):
    """The tiles are inside the shelf and remembered. ``device`` names the GPU that will send them, where one does."""

    device: str = ""


class Fail(_Struct, frozen=True):
    """The request failed, or the stream ends here; an error as :func:`weightsync.errors.to_wire` gives it."""

    kind: str
    message: str


class Join(_Struct, frozen=True):
    """Of ``collective`` and ``nccl``, to a :class:`Start`: the broadcast begins, to all readers in this epoch's group.

    A reader that is in another epoch's group leaves it and joins this one, as ``rank`` of ``size``, at ``port`` of the owner.
    Buckets have at most ``buffer_bytes`` bytes, header included.
    """

    epoch: str
    rank: int
    size: int
    port: int
    buffer_bytes: int


Request = Want | Start | Meet | Ready | Fail | Join

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def ask(channel: Channel, request: Request, deadline: Deadline) -> None:
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
