"""The compiled socket loops: interrupted at any byte they go on from there, and they notice every way in which a stream ends."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, PeerLost
from weightsync.transports.net.channel import Channel
from weightsync.transports.tcp.transport import TileStream
from weightsync_testing.copy_cases import Wanted, big, keyed, odd_shapes
from weightsync_testing.owner_process import contents

Pair = tuple[Channel, Channel]


class Impatient(Channel):
    """Every call ends after two milliseconds, wherever it is."""

    def bound(self, option: int, deadline: Deadline, what: str) -> None:
        deadline.remaining(what)
        self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 2000))


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    channels = Impatient(one, "the reader"), Impatient(other, "the owner")
    yield channels
    for channel in channels:
        channel.close()


def send_all(channel: Channel, wanted: Wanted, region: np.ndarray[tuple[int], np.dtype[np.uint8]], deadline: Deadline) -> None:
    bases = np.array([region.ctypes.data], np.int64)
    stream = TileStream(channel)
    for tiles in wanted.groups:
        stream.send(tiles, bases, 0, len(tiles), tiles.nbytes, deadline)


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_anywhere(pair: Pair, seed: int) -> None:
    """Chunks of a few bytes to a few slices arrive with pauses, into buffers that are always full or empty."""
    wanted = keyed(odd_shapes(1 << 20, seed) if seed else big(3 << 19, groups=1), seed)
    region = contents(wanted.nbytes, 1)
    wanted.target[:] = 0xA5
    digests = np.zeros(sum(map(len, wanted.groups)), np.uint64)
    first, second = socket.socketpair()
    relayed = Channel(first, "the relay")
    sender = threading.Thread(target=send_all, args=(pair[0], wanted, region, Deadline(30)))
    pause = threading.Event()

    def relay() -> None:
        random = np.random.default_rng(seed)
        with second:
            while data := pair[1].socket.recv(int(2 ** random.uniform(0, 18))):
                second.sendall(data)
                pause.wait(0.004 if random.random() < 0.2 else 0)

    pair[1].socket.setblocking(True)
    carrier = threading.Thread(target=relay)
    sender.start()
    carrier.start()
    stream = TileStream(Impatient(relayed.socket, "the relay"))
    for tiles in wanted.groups:
        stream.receive(tiles, 0, len(tiles), tiles.nbytes, Deadline(30), digests)
    sender.join(10)
    pair[0].abort()
    carrier.join(10)
    relayed.close()
    assert np.array_equal(wanted.target, wanted.expected(region))
    assert np.array_equal(digests, wanted.digests())


def test_the_stream_ends(pair: Pair) -> None:
    wanted = big(1 << 20, groups=1)
    reader, owner = pair
    owner.socket.sendall(bytes(1000))
    owner.close()
    with pytest.raises(PeerLost):
        TileStream(reader).receive(wanted.groups[0], 0, 2, wanted.groups[0].nbytes, Deadline(5), None)
    with pytest.raises(PeerLost):
        send_all(reader, wanted, contents(wanted.nbytes, 1), Deadline(5))


@pytest.mark.parametrize("sends", [False, True])
def test_deadline_and_abort(pair: Pair, sends: bool) -> None:
    wanted = big(1 << 20, groups=1)
    region = contents(wanted.nbytes, 1)

    def move(seconds: float) -> None:
        if sends:
            send_all(pair[0], wanted, region, Deadline(seconds))
        else:
            TileStream(pair[0]).receive(wanted.groups[0], 0, 2, wanted.groups[0].nbytes, Deadline(seconds), None)

    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        move(0.2)
    assert time.monotonic() - started < 1.5
    timer = threading.Timer(0.1, pair[0].abort)
    timer.start()
    with pytest.raises(Aborted):
        move(10)
    timer.join()
