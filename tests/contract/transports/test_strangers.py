"""A data socket under a flood: strangers are few, push out themselves, and a reader with the key gets in and is served."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from weightsync.deadline import Deadline
from weightsync.transports.host import this_host
from weightsync.transports.listener import Listener
from weightsync.transports.shelf import Shelf
from weightsync.transports.tcp import ListeningOwner, Tcp

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY = secrets.token_bytes(32)
PLACES = 32


@pytest.fixture
def owner() -> Iterator[ListeningOwner]:
    shelf = Shelf(4096, "layout")
    owner = Tcp().serve(shelf, KEY, this_host())
    yield owner
    owner.close()
    shelf.close()


def connect(owner: ListeningOwner, host: str) -> socket.socket:
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


def test_a_flood_pushes_out_itself(owner: ListeningOwner) -> None:
    with contextlib.ExitStack() as held:
        lonely = held.enter_context(connect(owner, "127.0.0.2"))
        flood = [held.enter_context(connect(owner, "127.0.0.3")) for _ in range(2 * PLACES)]
        ends = time.monotonic() + 3
        while sum(map(is_open, flood)) > PLACES and time.monotonic() < ends:
            threading.Event().wait(0.02)
        assert sum(map(is_open, flood)) < PLACES
        assert is_open(lonely), "somebody from elsewhere was pushed out"
        assert is_open(flood[-1])


def test_a_reader_gets_in_and_stays_while_strangers_knock(owner: ListeningOwner) -> None:
    stop = threading.Event()
    made = [0]

    def knock() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connect(owner, "127.0.0.3").close()
                made[0] += 1

    before = Tcp().connect(owner.offer, KEY, Deadline(10))
    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        threading.Event().wait(0.3)
        during = Tcp().connect(owner.offer, KEY, Deadline(40))  # behind a full backlog, and the kernel tries again after 1, 3, 7 s
        during.prepare([], "layout", Deadline(10))
        before.prepare([], "layout", Deadline(10))
        during.close()
    finally:
        stop.set()
        knocking.join(10)
        before.close()
    assert made[0] > 10


def test_many_readers_of_this_user_may_arrive_at_once() -> None:
    """128 ranks on one busy host pushed each other out before they had proved anything."""
    address = f"\0weightsync-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as sock, contextlib.ExitStack() as held:
        sock.bind(address)
        listener = Listener(sock, "test", KEY, secrets.token_bytes(16), lambda channel: None, lambda one: True)
        held.callback(listener.close)
        slow = [held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4 * PLACES)]
        for one in slow:
            one.settimeout(5)
            one.connect(address)
        ends = time.monotonic() + 5
        while len(listener._channels) < len(slow) and time.monotonic() < ends:
            threading.Event().wait(0.01)
        assert all(map(is_open, slow))
