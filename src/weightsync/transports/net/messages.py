"""Messages between a publisher and its readers, in ``CONTROL`` frames: MessagePack structs, bounded before they are decoded.

The set is open: a transport defines its own messages as subclasses of :class:`ControlMessage`, and gives their decoder to the
functions that receive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, StaleSource, TransportUnavailable, from_wire, to_wire
from weightsync.protocol.messages import decoding
from weightsync.transports.net.channel import CONTROL, HEADER, Channel, FrameHeader

MAX_TILES = 1 << 22
"""Most tiles that one reader may want of one publisher."""
MAX_GROUPS = 1 << 20
REQUEST_BYTES = 40 * MAX_TILES + 8 * MAX_GROUPS + 4096
"""Most bytes of a request that a publisher reads, from a reader that has proved to know the key."""
ANSWER_BYTES = 1 << 16
_IDLE_SECONDS = 3600.0
"""A reader that asks for nothing so long is cut off; it connects again when it wants something."""
ANSWER_SECONDS = 10.0
"""How long a reader has to take a short answer."""
_LONGEST_SECONDS = 3600.0
_SMALL_BYTES = 4096
"""A request of at most this many bytes is no table."""
_LEAST_ROOM = 256 << 20
_SCRATCH_BYTES = 1 << 16
_REPORTED = "sent by the publisher"


class ControlMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. The name of its class travels with each."""


class RegisterTiles(ControlMessage, frozen=True):
    """The tiles that will be wanted, for a plan made for this layout; answered by :class:`Ready` or :class:`Fail`.

    ``counts`` holds the tiles of each group (int64, little-endian), ``tiles`` a row of five int64 for each tile: region, source,
    source stride, rows, row bytes.
    """

    layout_digest: str
    counts: bytes
    tiles: bytes


class Start(ControlMessage, frozen=True):
    """Send all groups in order from this version within ``seconds``; answered by data frames and an end, or :class:`Fail`."""

    version: int
    seconds: float


class Ready(ControlMessage, frozen=True):
    """Acknowledges a table of tiles: every tile is inside the region. ``device`` is the sending GPU, if any."""

    device: str = ""


class Fail(ControlMessage, frozen=True):
    """The request failed, or the stream ends here; an error as :func:`weightsync.errors.to_wire` gives it."""

    kind: str
    message: str


Messages = msgspec.msgpack.Decoder[Any]
"""The messages that a transport understands: a decoder of the union of their types, each a :class:`ControlMessage`."""
Handlers = Mapping[type[ControlMessage], Callable[[Any], ControlMessage | None]]
"""What a publisher does with each type of request; it returns the answer, or ``None`` for no answer yet."""

COMMON: Messages = msgspec.msgpack.Decoder(RegisterTiles | Start | Ready | Fail)
"""What every publisher and its readers send. A transport with other messages gives its own decoder instead."""


def transfer_deadline(seconds: float) -> Deadline:
    """The deadline of a transfer within ``seconds``, as a reader asks for it: from a millisecond to an hour."""
    if math.isnan(seconds):
        raise ProtocolError("the timeout of a transfer is not a number")
    return Deadline(min(max(seconds, 1e-3), _LONGEST_SECONDS))


def send_request(channel: Channel, request: ControlMessage, deadline: Deadline) -> None:
    """Send one request or answer."""
    body = msgspec.msgpack.encode(request)
    channel.send([FrameHeader(CONTROL, nbytes=len(body)).pack(), body], deadline)


def decode_control(
    channel: Channel, header: FrameHeader, most: int, deadline: Deadline, messages: Messages = COMMON
) -> ControlMessage:
    """The body of a control frame whose header was read. Raises :class:`~weightsync.errors.ProtocolError` beyond ``most`` bytes."""
    if header.kind != CONTROL or header.nbytes > most:
        raise ProtocolError(f"{channel.peer} sent frame kind {header.kind} of {header.nbytes} bytes where a short message was due")
    with decoding(f"{channel.peer} sent a message that cannot be read"):
        message: ControlMessage = messages.decode(channel.receive(header.nbytes, deadline))
    return message


def next_control(channel: Channel, most: int, deadline: Deadline, messages: Messages = COMMON) -> ControlMessage:
    """Receive the next frame, which must be a control frame."""
    return decode_control(channel, FrameHeader.unpack(channel.receive(HEADER.size, deadline)), most, deadline, messages)


def next_answer(channel: Channel, most: int, deadline: Deadline, messages: Messages = COMMON) -> ControlMessage:
    """Receive a publisher's answer. Raises the error that it reports."""
    return unless_failed(next_control(channel, most, deadline, messages))


def unless_failed(answer: ControlMessage) -> ControlMessage:
    """Return a publisher's answer. Raises the error that it reports, of which :func:`reported` is true."""
    if isinstance(answer, Fail):
        error = from_wire(answer.kind, answer.message)
        error.add_note(_REPORTED)
        raise error
    return answer


def reported(error: BaseException) -> bool:
    """Whether the publisher itself reported ``error``: then nothing more of its answer comes, and the connection can be used."""
    return _REPORTED in getattr(error, "__notes__", ())


class TableBudget:
    """Limits the memory that one publisher spends on the tables of all its readers, for a region of ``nbytes`` bytes.

    The limit is an eighth of the region, and at least 256 MiB, which is 6.7 million tiles. (Decoded, a table has twice the size.)
    Without it a thousand readers, each within its own limits, could fill the memory of a trainer. Thread-safe.
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


def next_request(channel: Channel, budget: TableBudget, deadline: Deadline, messages: Messages = COMMON) -> ControlMessage:
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
        return decode_control(channel, header, REQUEST_BYTES, deadline, messages)


def serve_requests(
    channel: Channel,
    budget: TableBudget,
    handlers: Handlers,
    messages: Messages = COMMON,
) -> None:
    """Answer a reader's requests, each by the handler of its type, until the reader goes away; ``None`` is no answer yet.

    What a handler raises because of the request is the answer. Raises what ends the connection.
    """
    try:
        while True:
            request = next_request(channel, budget, Deadline(_IDLE_SECONDS), messages)
            try:
                if type(request) not in handlers:
                    raise ProtocolError(f"a reader does not say {type(request).__name__}")
                answer = handlers[type(request)](request)
            except (StaleSource, ProtocolError, TransportUnavailable) as error:
                answer = Fail(*to_wire(error))
            if answer is not None:
                send_request(channel, answer, Deadline(ANSWER_SECONDS))
    finally:
        budget.leave(channel)


def _discard(channel: Channel, nbytes: int, deadline: Deadline) -> None:
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
    while nbytes:
        part = scratch[: min(nbytes, len(scratch))]
        channel.receive_into([part], deadline)
        nbytes -= len(part)
