"""A data socket under a flood: strangers are few, push out themselves, and a reader with the key gets in and is served."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError, StaleSource
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.net import listener
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import greet_publisher
from weightsync.transports.net.listener import Listener
from weightsync.transports.net.listening_publisher import ListeningPublisher
from weightsync.transports.tcp.transport import Tcp

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY = secrets.token_bytes(32)
PLACES = 32


@pytest.fixture
def owner() -> Iterator[ListeningPublisher]:
    region = PublishedRegion(4096, "layout")
    owner = Tcp().publish(region, KEY, this_host())
    yield owner
    owner.close()
    region.close()


def connect(owner: ListeningPublisher, host: str) -> socket.socket:
    port = int(owner.offer.address.partition("/")[0].rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(host, 0))


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return bool(sock.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def test_a_flood_pushes_out_itself(owner: ListeningPublisher) -> None:
    with contextlib.ExitStack() as held:
        lonely = held.enter_context(connect(owner, "127.0.0.2"))
        flood = [held.enter_context(connect(owner, "127.0.0.3")) for _ in range(2 * PLACES)]
        ends = time.monotonic() + 3
        while sum(map(is_open, flood)) > PLACES and time.monotonic() < ends:
            threading.Event().wait(0.02)
        assert sum(map(is_open, flood)) < PLACES
        assert is_open(lonely), "somebody from elsewhere was pushed out"
        assert is_open(flood[-1])


@pytest.mark.rare
def test_a_reader_gets_in_and_stays_while_strangers_knock(owner: ListeningPublisher) -> None:
    stop = threading.Event()
    made = [0]

    def knock() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connect(owner, "127.0.0.3").close()
                made[0] += 1

    before = Tcp().open(owner.offer, KEY, Deadline(10))
    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        threading.Event().wait(0.3)
        during = Tcp().open(owner.offer, KEY, Deadline(40))  # behind a full backlog, and the kernel tries again after 1, 3, 7 s
        during.prepare([], "layout", Deadline(10))
        before.prepare([], "layout", Deadline(10))
        during.close()
    finally:
        stop.set()
        knocking.join(10)
        before.close()
    assert made[0] > 10


def reader(owner: ListeningPublisher, host: str) -> Channel:
    """A reader at this address that has proved to know the key, and asks for nothing."""
    channel = Channel(connect(owner, host), "the publisher")
    greet_publisher(channel, KEY, bytes.fromhex(owner.offer.address.split("/")[1]), Deadline(5))
    counted(owner)
    return channel


def counted(owner: ListeningPublisher) -> None:
    """Return when every reader that has proved itself has its place."""
    ends = time.monotonic() + 5
    while owner._listener._unauthenticated and time.monotonic() < ends:
        threading.Event().wait(0.002)
    assert not owner._listener._unauthenticated


def lives(channel: Channel, seconds: float = 0.5) -> bool:
    """Whether the publisher still has this connection after this time."""
    ends = time.monotonic() + seconds
    while channel.peer_lives() and time.monotonic() < ends:
        threading.Event().wait(0.01)
    return channel.peer_lives()


def test_readers_at_one_address_do_not_keep_others_out(owner: ListeningPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stolen engine held all 1,024 places of a trainer's data socket with the key that it had been given."""
    monkeypatch.setattr(listener, "_MAX_READERS", 4)
    with contextlib.ExitStack() as held:

        def arrive(host: str) -> Channel:
            channel = reader(owner, host)
            held.callback(channel.close)
            return channel

        thieves = [arrive("127.0.0.2") for _ in range(4)]
        others = [arrive("127.0.0.3") for _ in range(2)]
        assert [lives(one, 20) for one in thieves[:2]] == [False, False]  # a busy machine takes its time
        assert [lives(one) for one in (*thieves[2:], *others)] == [True, True, True, True]
        arrive("127.0.0.3")  # as many as at the other address: one of its own goes
        left = [lives(one) for one in (*thieves[2:], *others)]
        assert left[:2] == [True, True]
        assert sum(left[2:]) == 1  # the owner may have taken up the second before the first


def test_a_reader_at_a_crowded_address_gets_in_and_comes_back(owner: ListeningPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_READERS", 4)
    with contextlib.ExitStack() as held:
        honest = Tcp().open(owner.offer, KEY, Deadline(5))
        held.callback(honest.close)
        counted(owner)
        for _ in range(2):
            for _ in range(6):
                held.callback(reader(owner, "127.0.0.1").close)
            honest.prepare([], "layout", Deadline(5))
            counted(owner)


def test_a_transfer_is_not_cut_for_a_reader_at_the_same_address(owner: ListeningPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_READERS", 2)
    with contextlib.ExitStack() as held:
        readers = [reader(owner, "127.0.0.1") for _ in range(2)]
        for one in readers:
            held.callback(one.close)
        ends = time.monotonic() + 5
        while len(owner._listener._channels) < 2 and time.monotonic() < ends:  # the owner may not have taken up the last one yet
            threading.Event().wait(0.01)
        busy = list(owner._listener._channels.values())
        owner._listener._transfers += busy
        late = reader(owner, "127.0.0.1")
        held.callback(late.close)
        assert [lives(one) for one in (*readers, late)] == [True, True, False]
        elsewhere = reader(owner, "127.0.0.3")
        held.callback(elsewhere.close)
        assert [lives(one) for one in (*readers, elsewhere)] == [False, True, True]


def test_many_readers_of_this_user_may_arrive_at_once() -> None:
    """128 ranks on one busy host pushed each other out before they had proved anything."""
    address = f"\0weightsync-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as sock, contextlib.ExitStack() as held:
        sock.bind(address)
        serving = Listener(sock, "test", KEY, secrets.token_bytes(16), lambda channel: None, lambda one: True)
        held.callback(serving.close)
        slow = [held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4 * PLACES)]
        for one in slow:
            one.settimeout(5)
            one.connect(address)
        ends = time.monotonic() + 5
        while len(serving._channels) < len(slow) and time.monotonic() < ends:
            threading.Event().wait(0.01)
        assert all(map(is_open, slow))


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """As a limit of processes does."""
    start, left = threading.Thread.start, [times]

    def refused(thread: threading.Thread) -> None:
        if thread.name == name and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_thread_that_cannot_be_started_costs_one_connection_only(
    owner: ListeningPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_threads(monkeypatch, "weightsync-tcp-serve", 1)
    with pytest.raises(PeerLost):
        Tcp().open(owner.offer, KEY, Deadline(5))
    Tcp().open(owner.offer, KEY, Deadline(5)).close()
    assert "can't start new thread" in caplog.text


class Clock:
    """Stands for the listener's clock, and counts what it lets in."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self.now = listener, time.monotonic()

    def taken_in(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> int:
        """Turns of strangers in so many seconds of a flood, once those that were saved up are used."""
        monkeypatch.setattr("weightsync.transports.net.listener.time", self)
        while not self._listener._acquire():
            continue
        end, count = self.now + seconds, 0
        while self.now < end:
            wait = self._listener._acquire()
            count += not wait
            self.now += max(wait, 1e-6)
        return count

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("encrypt", [False, True])
def test_strangers_are_taken_in_slowly_and_more_so_beside_a_transfer(encrypt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with PublishedRegion(4096, "layout") as region:
        owner = Tcp(encrypt=encrypt).publish(region, KEY, this_host())
        try:
            clock = Clock(owner._listener)
            assert clock.taken_in(monkeypatch, 10) == pytest.approx(500, abs=2)
            with owner.busy(), owner.busy():
                assert clock.taken_in(monkeypatch, 10) == pytest.approx(250, abs=2)
            assert clock.taken_in(monkeypatch, 10) == pytest.approx(500, abs=2)
        finally:
            monkeypatch.undo()
            owner.close()


def test_a_transfer_is_noticed_while_it_runs(owner: ListeningPublisher) -> None:
    source = Tcp().open(owner.offer, KEY, Deadline(10))
    try:
        with pytest.raises(StaleSource):
            source.begin(1, Deadline(10))
        assert owner._listener._transfers == []
    finally:
        source.close()


def tables(count: int) -> CopyTable:
    """As many tiles of a byte."""
    here = np.zeros(1, np.uint8)
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    return CopyTable(np.zeros(count, np.int32), zeros, zeros, zeros + here.ctypes.data, zeros, ones, ones)


def test_all_readers_together_have_room_for_so_many_tables(owner: ListeningPublisher) -> None:
    """One with the key could open a thousand connections, and have each remembered with a table of hundreds of megabytes."""
    room = owner._budget  # type: ignore[attr-defined]
    room.nbytes = 3 << 20  # 256 MiB otherwise
    with contextlib.ExitStack() as held:
        sources = [Tcp().open(owner.offer, KEY, Deadline(10)) for _ in range(3)]
        for source in sources:
            held.callback(source.close)
        for source in sources[:2]:
            source.prepare([tables(30_000)], "layout", Deadline(10))
            source.prepare([tables(30_001)], "layout", Deadline(10))  # another table, instead of the first
        with pytest.raises(ProtocolError, match="does not fit beside"):
            sources[2].prepare([tables(30_000)], "layout", Deadline(10))
        sources[2].prepare([tables(1)], "layout", Deadline(10))  # the connection goes on
        sources[0].close()
        ends = time.monotonic() + 5
        while len(room._taken) > 1 and time.monotonic() < ends:
            threading.Event().wait(0.01)
        sources[2].prepare([tables(30_000)], "layout", Deadline(10))
