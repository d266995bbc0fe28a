"""How a reader connects to a publisher that listens on a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from weightsync.daemon_threads import in_daemon_thread
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, PeerLost
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.connected_reader import Dial
from weightsync.transports.net.handshake import greet_publisher

_Address = tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]  # a family, and what connect() takes
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that vanished is noticed within a minute


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a host that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def dialer(host: str, port: int, publisher_id: bytes, key: bytes, make: Callable[[socket.socket, str], Channel] = Channel) -> Dial:
    """Return the function by which a reader connects to the publisher ``publisher_id``, and again after a failure."""

    def dial(adopt: Callable[[Channel], None], deadline: Deadline) -> Channel:
        channel = _open_channel(host, port, adopt, deadline, make)
        channel.secure(deadline)
        greet_publisher(channel, key, publisher_id, deadline)
        return channel

    return dial


def _look_up(host: str, port: int, deadline: Deadline) -> list[_Address]:
    """Addresses of ``host``. The C library keeps no time in this, so a thread waits for it, and is left alone if it is late."""
    looking = in_daemon_thread(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM), "weightsync-tcp-look-up")
    try:
        return [(info[0], info[4]) for info in deadline.result(looking, f"looking up the source's host {host}")]
    except DeadlineExceeded:
        raise
    except (OSError, UnicodeError) as error:
        raise PeerLost(f"the source's host {host} cannot be found: {error}") from error


def _open_channel(
    host: str,
    port: int,
    adopt: Callable[[Channel], None],
    deadline: Deadline,
    make: Callable[[socket.socket, str], Channel],
) -> Channel:
    """Return a connection to a publisher, given to ``adopt`` before it is made."""
    reasons = []
    for family, where in _look_up(host, port, deadline):
        with ExitStack() as owned:
            sock = owned.enter_context(socket.socket(family, socket.SOCK_STREAM))
            channel = make(sock, f"the source at {host} port {port}")
            owned.callback(channel.close)
            try:
                adopt(channel)
                tune(channel.socket)
                channel.socket.settimeout(deadline.remaining(f"connecting to {channel.peer}"))
                channel.socket.connect(where)
                channel.socket.settimeout(None)
            except TimeoutError:
                raise DeadlineExceeded(f"{channel.peer} did not accept a connection within {deadline.seconds:g} s") from None
            except OSError as error:
                if channel.aborted:
                    raise Aborted(f"connecting to {channel.peer} was aborted") from None
                reasons.append(str(error))
                continue
            owned.pop_all()
            return channel
    raise PeerLost(f"no publisher answers at {host} port {port}: {'; '.join(reasons)}")
