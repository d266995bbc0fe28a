"""Connections that do not come about leave no descriptor."""

from __future__ import annotations

import socket

import pytest

from weightsync.deadline import Deadline
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.dialer import dialer


def test_a_socket_is_closed_whose_channel_cannot_be_made() -> None:
    made: list[socket.socket] = []

    def make(sock: socket.socket, peer: str) -> Channel:
        made.append(sock)
        raise MemoryError(peer)

    with pytest.raises(MemoryError) as raised:  # which is held, and with it the frames that held the socket
        dialer("127.0.0.1", 9, b"owner", b"key", make)(lambda _: None, Deadline(5.0))
    assert [sock.fileno() for sock in made] == [-1], raised
