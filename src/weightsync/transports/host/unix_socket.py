"""Reaching a process of the same user on the same machine: a Linux abstract socket of an unguessable name, both ends proved.

There is no file, so nothing to leave behind and no directory whose permissions matter.
"""

from __future__ import annotations

import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, PeerLost, ProtocolError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import Transport
from weightsync.transports.host.memory import reopen_read_only
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import HELLO_SECONDS, ID_BYTES, check_key, greet_publisher
from weightsync.transports.net.listener import Listener, same_user

T = TypeVar("T")


def listen_local(prefix: str, name: str, key: bytes, serve: Callable[[Channel], None]) -> tuple[Listener, str]:
    """Serve authenticated readers of this user; returns the listener and the address that they need.

    Raises :class:`~weightsync.errors.ConfigurationError` for a key that is too short.
    """
    publisher_id = secrets.token_bytes(ID_BYTES)
    address = prefix + publisher_id.hex()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with OnFailure(sock.close):
        sock.bind("\0" + address)
        return Listener(sock, name, check_key(key), publisher_id, serve, same_user), address


def connect_local(prefix: str, address: str, key: bytes, peer: str, deadline: Deadline) -> Channel:
    """An authenticated channel to the publisher at ``address``, which ``peer`` names in messages.

    Raises :class:`~weightsync.errors.ProtocolError` for an address of another kind, and what
    :meth:`weightsync.transports.base.Transport.open` raises.
    """
    digits = address.removeprefix(prefix)
    if not address.startswith(prefix) or len(digits) != 2 * ID_BYTES or not set(digits) <= set("0123456789abcdef"):
        raise ProtocolError(f"{address!r} is not the address of {peer}")
    with ExitStack() as owned:
        sock = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.settimeout(deadline.remaining("connecting"))
            sock.connect("\0" + address)
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} did not accept a connection in time") from None
        except OSError as error:
            raise PeerLost(f"{peer} does not listen at {address}: {error}") from error
        channel = Channel(sock, peer)
        if not same_user(sock):
            raise AuthenticationError(f"{peer} belongs to another user")
        greet_publisher(channel, key, bytes.fromhex(digits), deadline)
        owned.pop_all()
        return channel


def open_local(prefix: str, offer: Offer, key: bytes, deadline: Deadline, make: Callable[[Channel, Deadline], T]) -> T:
    """Return the reader that ``make`` makes of an authenticated channel to the publisher behind ``offer``."""
    channel = connect_local(prefix, offer.address, key, "the source on this host", deadline)
    with OnFailure(channel.close):
        return make(channel, deadline)


class LocalPublisher(ABC):
    """Hands the descriptor of a region, opened for reading only, to authenticated readers of the same user.

    ``descriptor`` returns ``None`` once the region is closed; ``what`` names the transport in messages.
    """

    def __init__(
        self, kind: type[Transport], what: str, prefix: str, descriptor: Callable[[], int | None], key: bytes, local_host: Host
    ) -> None:
        if descriptor() is None:
            raise TransportUnavailable(f"{what} needs Linux: this machine's memory cannot be handed to another process")
        self._descriptor = descriptor
        self._listener, address = listen_local(prefix, what.lower().replace(" ", "-"), key, self._serve)
        self.offer = Offer(scheme=kind.name, address=address, host=local_host, traits=kind.traits)

    @abstractmethod
    def _facts(self) -> bytes:
        """Return what goes with the descriptor."""

    def _serve(self, channel: Channel) -> None:
        region_fd = self._descriptor()
        if region_fd is None:
            return  # the region was closed before its publisher; the reader sees the connection end
        fd = reopen_read_only(region_fd)
        try:
            channel.send_descriptor(self._facts(), fd, Deadline(HELLO_SECONDS))
        finally:
            os.close(fd)
        self._stay(channel)

    def _stay(self, channel: Channel) -> None:
        """Keep the connection until either end closes it."""
        channel.next_byte()

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._listener.close()
