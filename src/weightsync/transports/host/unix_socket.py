"""Reaching a process of the same user on the same machine: a Linux abstract socket of an unguessable name, both ends proved.

There is no file, so nothing to leave behind and no directory whose permissions matter.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, PeerLost, ProtocolError
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import ID_BYTES, check_key, greet_publisher
from weightsync.transports.net.listener import Listener, same_user


def listen_local(prefix: str, name: str, key: bytes, serve: Callable[[Channel], None]) -> tuple[Listener, str]:
    """Serve authenticated readers of this user; returns the listener and the address that they need.

    Raises :class:`~weightsync.errors.ConfigurationError` for a key that is too short.
    """
    publisher_id = secrets.token_bytes(ID_BYTES)
    address = prefix + publisher_id.hex()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + address)
        return Listener(sock, name, check_key(key), publisher_id, serve, same_user), address
    except BaseException:
        sock.close()
        raise


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
