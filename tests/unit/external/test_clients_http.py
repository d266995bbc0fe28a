"""Holds the client of engines' routes to its bounds: a deadline for a whole answer, a largest one, an end from another thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, PeerLost, ProtocolError
from weightsync.external.clients.http import EngineHttp, HttpCall

pytestmark = pytest.mark.usefixtures("no_leaks")

CALL = HttpCall("GET", "/state")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def client_of(listener: socket.socket) -> EngineHttp:
    return EngineHttp(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_close_ends_the_calls_under_way_and_refuses_new_ones(listener: socket.socket) -> None:
    client = client_of(listener)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(client.call, CALL, Deadline(30))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1 << 16).startswith(b"GET /state HTTP/1.1")
            client.close()
            with pytest.raises(PeerLost):
                calling.result(5)
    with pytest.raises(PeerLost, match="were ended"):
        client.call(CALL, Deadline(5))
    client.close()


def test_an_answer_that_trickles_ends_by_the_deadline(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        calling = threads.submit(client_of(listener).call, CALL, Deadline(0.3))
        connection, _ = listener.accept()
        with connection, pytest.raises(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                time.sleep(0.02)
                connection.sendall(b" ")
        with pytest.raises(DeadlineExceeded, match="state"):
            calling.result(5)
    assert time.monotonic() - started < 2


def test_an_answer_that_is_too_large_is_refused(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(client_of(listener).call, CALL, Deadline(10))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * ((1 << 20) + 1))
            with pytest.raises(ProtocolError, match="1048576 bytes"):
                calling.result(5)


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1", "http://user:word@host", "file:///etc/passwd"])
def test_what_is_not_the_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not the URL of an engine"):
        EngineHttp(url)
