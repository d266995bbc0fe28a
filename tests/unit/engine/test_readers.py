"""Offers come from others: what listens at the addresses in them must not be learned from the errors that leave this machine."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from weightsync.deadline import Deadline
from weightsync.engine.readers import Readers
from weightsync.errors import PeerLost, TransportUnavailable
from weightsync.protocol.messages import Offer, SourceAddress
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.tcp.transport import StreamReader, Tcp

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
HERE = this_host()
ID = "00" * 16


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Somebody who says ``answer`` to everybody and hangs up, or nothing and holds the line."""
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock = held.enter_context(server.accept()[0])
                    if answer is not None:
                        sock.sendall(answer)
                        sock.close()
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def message(address: str, seconds: float = 5.0) -> str:
    source = SourceAddress("trainer/0", "layout", (Offer("tcp", address, HERE),), KEY)
    with pytest.raises(TransportUnavailable) as caught:
        Readers([Tcp()], HERE, False, lambda: None).open(source, None, Deadline(seconds))
    return str(caught.value)


def test_all_ways_in_which_an_offer_fails_look_alike(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ExitStack() as owned:
        region = owned.enter_context(PublishedRegion(4096, "layout"))
        owners = [Tcp(encrypt=encrypt).publish(region, OTHER_KEY, HERE) for encrypt in (False, True)]
        for owner in owners:
            owned.callback(owner.close)
        web = owned.enter_context(listener(b"HTTP/1.1 200 OK\r\n\r\n" + b"secret banner " * 20))
        rude, silent = owned.enter_context(listener(b"")), owned.enter_context(listener(None))
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = closed.getsockname()[1]
        messages = {
            "nobody": message(f"127.0.0.1:{nobody}/{ID}"),
            "another program": message(f"127.0.0.1:{web}/{ID}"),
            "one that hangs up": message(f"127.0.0.1:{rude}/{ID}"),
            "one that says nothing": message(f"127.0.0.1:{silent}/{ID}", seconds=0.3),
            "no such host": message(f"no-such-host.invalid:80/{ID}"),
            "another key": message(owners[0].offer.address),
            "another key, encrypted": message(owners[1].offer.address),
            "another certificate": message(owners[1].offer.address.rpartition("/")[0] + "/" + "00" * 32),
        }
    assert len(set(messages.values())) == 1, messages
    assert "own log" in messages["nobody"]
    assert "refused" in caplog.text
    assert "another certificate" in caplog.text


def test_a_connection_that_cannot_be_made_again_says_no_more() -> None:
    with listener(b"HTTP/1.1 200 OK\r\n\r\n" + b"secret banner " * 20) as web, PublishedRegion(4096, "layout") as region:
        owner = Tcp().publish(region, KEY, HERE)
        source = Tcp().open(owner.offer, KEY, Deadline(5))
        assert isinstance(source, StreamReader)
        owner.close()
        texts = set()
        for address in (owner.offer.address, f"127.0.0.1:{web}/{ID}"):  # a name may lead elsewhere the second time

            def dial(adopt: object, deadline: Deadline, address: str = address) -> object:
                return Tcp().open(Offer("tcp", address, HERE), KEY, deadline)

            source._dial = dial  # type: ignore[assignment]
            with pytest.raises(PeerLost) as caught:
                source.prepare([], "layout", Deadline(5))
            texts.add(str(caught.value))
        source.close()
    assert len(texts) == 1, texts
