"""Base of the publishers that listen on a socket."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Host, Offer
from weightsync.protocol.tokens import is_loopback
from weightsync.transports.base import Transport
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import ID_BYTES, check_key
from weightsync.transports.net.listener import Listener
from weightsync.transports.net.tls import EncryptedChannel, publisher_context

__all__ = ["ListeningPublisher"]


class ListeningPublisher(ABC):
    """Listens on one address for ``transport``, and serves each authenticated reader in a thread."""

    def __init__(
        self,
        transport: Transport,
        key: bytes,
        local_host: Host,
        bind: str,
        port: int,
        advertise: str | None,
        encrypt: bool | None = False,  # None: beyond loopback
    ) -> None:
        publisher_id = secrets.token_bytes(ID_BYTES)
        try:
            family, kind, _, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except socket.gaierror as error:
            raise ConfigurationError(f"transport {transport.name}: {bind!r} is not an address of this host: {error}") from error
        sock = socket.socket(family, kind)
        try:
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
            self._offer = Offer(scheme=transport.name, address=address, host=local_host, traits=traits)
            self._listener = Listener(sock, transport.name, check_key(key), publisher_id, self._serve, channel=make)
        except BaseException:
            sock.close()
            raise

    @property
    def offer(self) -> Offer:
        """See :class:`weightsync.transports.base.Publisher`."""
        return self._offer

    def busy(self) -> AbstractContextManager[None]:
        """Give a context for a transfer: see :meth:`Listener.busy`."""
        return self._listener.busy()

    @abstractmethod
    def _serve(self, channel: Channel) -> None:
        """Answer one reader, until it goes away."""

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._listener.close()
