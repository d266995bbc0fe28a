"""Base of the transports whose publishers listen on a socket: their addresses, and the publisher itself."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from weightsync.closing import OnFailure
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.protocol.messages import Host, Offer
from weightsync.protocol.tokens import is_loopback
from weightsync.transports.base import Transport
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.dialer import tune
from weightsync.transports.net.handshake import ID_BYTES, check_key
from weightsync.transports.net.listener import Listener
from weightsync.transports.net.tls import FINGERPRINT_BYTES, EncryptedChannel, publisher_context


class PublisherAddress(NamedTuple):
    """An address: ``host:port/id``, or ``host:port/id/fingerprint`` of a publisher that speaks only TLS."""

    host: str
    port: int
    publisher_id: bytes
    fingerprint: bytes

    @classmethod
    def parse(cls, address: str) -> PublisherAddress:
        """Parse the address of an offer.

        Raises:
            ProtocolError: It is not an address.
        """
        where, _, rest = address.partition("/")
        publisher_id, secured, fingerprint = rest.partition("/")
        host, _, port = where.rpartition(":")
        try:
            host = host.removeprefix("[").removesuffix("]")
            parsed = cls(host, int(port), bytes.fromhex(publisher_id), bytes.fromhex(fingerprint))
        except ValueError:
            parsed = cls("", 0, b"", b"")
        lengths = ID_BYTES, FINGERPRINT_BYTES if secured else 0
        if not parsed.host or not 0 < parsed.port < 1 << 16 or (len(parsed.publisher_id), len(parsed.fingerprint)) != lengths:
            raise ProtocolError(f"{address!r} is not the address of a publisher (host:port/id, or host:port/id/fingerprint)")
        return parsed


class NetworkTransport(Transport):
    """Base of the transports whose publishers are a :class:`ListeningPublisher`."""

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """Whether ``local_host`` could connect to the address of ``offer``: a loopback address only reaches its own host."""
        try:
            host = PublisherAddress.parse(offer.address).host
        except ProtocolError:
            return False
        return offer.host.name == local_host.name or not is_loopback(host)


class ListenAddress(NamedTuple):
    """Where a publisher listens, the host that it names to readers (by default ``bind``), and whether readers must encrypt.

    ``encrypt=None`` means: on every address but loopback. Port 0 selects a free one.
    """

    bind: str
    port: int = 0
    advertise: str | None = None
    encrypt: bool | None = False


class ListeningPublisher(ABC):
    """Listens on one address for ``transport``, and serves each authenticated reader in a thread."""

    def __init__(self, transport: Transport, key: bytes, local_host: Host, listen: ListenAddress) -> None:
        bind, port, advertise, encrypt = listen
        publisher_id = secrets.token_bytes(ID_BYTES)
        try:
            family, kind, _, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except socket.gaierror as error:
            raise ConfigurationError(f"transport {transport.name}: {bind!r} is not an address of this host: {error}") from error
        sock = socket.socket(family, kind)
        with OnFailure(sock.close):
            if port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(where)
            except OSError as error:
                raise ConfigurationError(
                    f"transport {transport.name}: cannot listen on {bind} port {port}: {error.strerror}"
                ) from error
            bound, actual = sock.getsockname()[:2]
            self.bound: str = bound
            """The address that it listens on."""
            shown = advertise or bound
            if not advertise and ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
                raise ConfigurationError(
                    f"transport {transport.name}: bound to every address ({bind}); say which one readers use: advertise=..."
                )
            host = f"[{shown}]" if ":" in shown else shown
            address = f"{host}:{actual}/{publisher_id.hex()}"
            make: Callable[[socket.socket, str], Channel] = Channel
            encrypted = encrypt or (encrypt is None and not is_loopback(bound))
            if encrypted:
                context, fingerprint = publisher_context()
                address += f"/{fingerprint.hex()}"
                make = functools.partial(EncryptedChannel, context=context)
            traits = msgspec.structs.replace(transport.traits, encrypted=encrypted)
            self.offer = Offer(scheme=transport.name, address=address, host=local_host, traits=traits)
            self._listener = Listener(sock, transport.name, check_key(key), publisher_id, self._accept, channel=make)

    def busy(self) -> AbstractContextManager[None]:
        """Give a context for a transfer: see :meth:`Listener.busy`."""
        return self._listener.busy()

    def _accept(self, channel: Channel) -> None:
        tune(channel.socket)
        self._serve(channel)

    @abstractmethod
    def _serve(self, channel: Channel) -> None:
        """Answer one reader, until it goes away."""

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._listener.close()
