"""Tiles over an encrypted channel: where records are cut, that they open in place, and that calls end in time."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.net import tls
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.encrypted_records import RECORD_BYTES
from weightsync.transports.net.tls import EncryptedChannel
from weightsync.transports.tcp.transport import TileStream
from weightsync_testing.copy_cases import keyed, odd_shapes
from weightsync_testing.owner_process import contents

KIB = 1 << 10


class Recorder(Channel):
    """Keeps what would be sent."""

    encrypted = True

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, "the reader")
        self.parts: list[bytes] = []

    def send(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, more: bool = False) -> None:
        self.parts += map(bytes, buffers)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    ends = socket.socketpair()
    yield Recorder(ends[0])
    for end in ends:
        end.close()


@pytest.fixture
def pair() -> Iterator[tuple[EncryptedChannel, EncryptedChannel]]:
    """An owner and its reader, with keys."""
    ends = socket.socketpair()
    context, fingerprint = tls.publisher_context()
    owner = EncryptedChannel(ends[0], "the reader", context)
    reader = EncryptedChannel(ends[1], "the owner", tls.reader_context(), fingerprint)
    securing = threading.Thread(target=owner.secure, args=(Deadline(10),))
    securing.start()
    reader.secure(Deadline(10))
    securing.join(10)
    yield owner, reader
    owner.close()
    reader.close()


def tiles_of(*shapes: tuple[int, int, int]) -> CopyTable:
    """Tiles of (rows, bytes of a row, stride at the owner), one after the other there, packed at the reader."""
    rows, row_bytes, stride = np.array(shapes, np.int64).T
    source = np.cumsum(rows * stride) - rows * stride
    target = np.cumsum(rows * row_bytes) - rows * row_bytes
    return CopyTable(np.zeros(len(rows), np.int32), source, stride, target, row_bytes, rows, row_bytes)


@pytest.mark.parametrize(
    ("tiles", "records"),
    [
        # A long run: equal parts of whole cache lines.
        (tiles_of((1, 893 * KIB, 893 * KIB)), [457_216, 457_216]),
        (tiles_of((1, 1300 * KIB, 1300 * KIB)), [443_776, 443_712, 443_712]),
        # Halves of columns are packed. A record that is half full ends with its tile.
        (tiles_of(*[(893, KIB, 2 * KIB)] * 2), [512 * KIB, 381 * KIB] * 2),
        # Short tiles share records, up to half of one.
        (tiles_of(*[(13, KIB, 2 * KIB)] * 50), [260 * KIB, 260 * KIB, 130 * KIB]),
        # What is packed goes out before a long run.
        (tiles_of((1, 5, 5), (1, 32 * KIB, 32 * KIB), (1, 7, 7)), [5, 32 * KIB, 7]),
    ],
)
def test_where_records_are_cut(recorder: Recorder, tiles: CopyTable, records: list[int]) -> None:
    region = contents(int((tiles.rows * tiles.source_stride).sum()), 1)
    TileStream(recorder).send(tiles, np.array([region.ctypes.data]), 0, len(tiles), tiles.nbytes, Deadline(10))
    assert [len(part) for part in recorder.parts] == records
    assert max(records) <= RECORD_BYTES
    runs = [
        region[tiles.source[tile] + row * tiles.source_stride[tile] :][: tiles.row_bytes[tile]]
        for tile in range(len(tiles))
        for row in range(tiles.rows[tile])
    ]
    assert b"".join(recorder.parts) == np.concatenate(runs).tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_tiles_of_any_shape_arrive_and_are_digested(pair: tuple[EncryptedChannel, EncryptedChannel], seed: int) -> None:
    owner, reader = pair
    wanted = keyed(odd_shapes(4 << 20, seed), seed)
    region = contents(wanted.nbytes, 1)
    wanted.target[:] = 0xA5
    digests = np.zeros(sum(map(len, wanted.groups)), np.uint64)

    def send() -> None:
        stream = TileStream(owner)
        for tiles in wanted.groups:
            stream.send(tiles, np.array([region.ctypes.data]), 0, len(tiles), tiles.nbytes, Deadline(20))

    sender = threading.Thread(target=send)
    sender.start()
    stream = TileStream(reader)
    for tiles in wanted.groups:
        stream.receive(tiles, 0, len(tiles), tiles.nbytes, Deadline(20), digests)
    sender.join(10)
    assert np.array_equal(wanted.target, wanted.expected(region))
    assert np.array_equal(digests, wanted.digests())


def test_a_record_opens_in_place_if_it_fits(pair: tuple[EncryptedChannel, EncryptedChannel]) -> None:
    owner, reader = pair
    for plain in (b"fits", b"does not fit", b"fits again"):
        owner.send([plain], Deadline(5))
    into = memoryview(bytearray(10))

    def receive(most: int) -> tuple[bytes, bool]:
        part, in_place = reader.receive_part(most, Deadline(5), into)
        return bytes(part), in_place

    assert receive(26) == (b"fits", True)
    assert bytes(into[:4]) == b"fits"
    assert receive(22) == (b"does not fit", False)
    assert receive(10) == (b"fits again", True)
    assert bytes(into) == b"fits again"


def test_a_record_that_was_altered_is_refused(pair: tuple[EncryptedChannel, EncryptedChannel]) -> None:
    owner, reader = pair
    sealed = bytearray(owner._sealing.seal(memoryview(b"weights")))
    sealed[5] ^= 1
    owner.socket.sendall(sealed)
    with pytest.raises(AuthenticationError, match="the connection was altered"):
        reader.receive(7, Deadline(5))


def test_calls_end_in_time_however_rarely_the_kernel_is_told() -> None:
    ends = socket.socketpair()
    channel = Channel(ends[0], "the owner")

    def limit() -> float:
        seconds, microseconds = struct.unpack("@ll", ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        return float(seconds + microseconds / 1e6)

    def bound(deadline: Deadline) -> float:
        channel.bound(socket.SO_RCVTIMEO, deadline, "receiving from")
        return limit()

    long = Deadline(10)
    first = bound(long)
    assert 9 < first <= 10.01
    assert bound(Deadline(1)) <= 1.01, "another deadline"
    assert 9 < bound(long) <= first
    long.at -= 5
    assert bound(long) <= 5.01, "the same, long ago"
    channel.unbound()
    assert limit() == 0
    assert 4 < bound(long) <= 5.01, "after a wait without limit"
    short = Deadline(0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="receiving from the owner"):
        channel.receive(1, short)
    assert 0.19 < time.monotonic() - started < 1.0
    for end in ends:
        end.close()
