"""A name server that does not answer costs a reader no more than its deadline."""

from __future__ import annotations

import socket
import threading

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.tcp.transport import Tcp

OFFER = Offer("tcp", f"trainer.example:7000/{'00' * 16}", Host("trainer", "trainer"))


def test_a_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    before = set(threading.enumerate())

    def silent(*_: object, **__: object) -> list[object]:
        answered.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    with pytest.raises(DeadlineExceeded, match=r"trainer\.example"):
        Tcp().open(OFFER, b"k" * 32, Deadline(0.2))
    answered.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PeerLost, match="cannot be found"):
        Tcp().open(OFFER, b"k" * 32, Deadline(5))
