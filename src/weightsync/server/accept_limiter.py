"""Taking connections in: at a bounded rate, and with few in the middle of TLS, so that a flood waits in the kernel's queue.

Whoever has shown the token gives back the turn that their connection took: a thousand agents that return at once are not slowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from ssl import SSLContext

from weightsync.config import Limits
from weightsync.server.connections import Connections

__all__ = ["Door"]

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2


class Door:
    """Accepts on ``listener`` from :meth:`open` to :meth:`close`, and gives each connection a protocol of ``make``.

    Over TLS with ``context``. Used on the event loop only.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: SSLContext | None,
        connections: Connections,
        limits: Limits,
    ) -> None:
        self._listener, self._make, self._context = listener, make, context
        self._connections, self._limits = connections, limits
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._greeting: dict[asyncio.Task[None], tuple[str, socket.socket]] = {}  # in order of arrival
        listener.setblocking(False)

    def open(self) -> None:
        """Take connections in from now on."""
        self._later = None
        self._loop.add_reader(self._listener.fileno(), self._ready)

    def close(self) -> None:
        """Take in no more, and drop whoever is still in the middle of TLS. The listener stays the caller's."""
        self._loop.remove_reader(self._listener.fileno())
        if self._later is not None:
            self._later.cancel()
        for task in list(self._greeting):
            self._drop(task)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(seconds, self.open)

    def _ready(self) -> None:
        wait = self._connections.turn()
        if wait > 0:
            self._pause(wait)
            return
        try:
            sock, peer = self._listener.accept()
            # asyncio does it only for sockets that name their protocol, and Python's listeners do not: an answer of two writes
            # would wait for the other side's delayed acknowledgement, 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Out of descriptors: the connection stays in the backlog; wait for some to be closed, not in a busy loop.
            _log.warning("cannot accept a connection: %s", error.strerror or error)
            self._pause(_RETRY_SECONDS)
            return
        sock.setblocking(False)
        if len(self._greeting) >= self._limits.strangers:
            most, _ = Counter(host for host, _ in self._greeting.values()).most_common(1)[0]
            self._drop(next(task for task, (host, _) in self._greeting.items() if host == most))
        task = asyncio.ensure_future(self._greet(sock))
        self._greeting[task] = str(peer[0]), sock
        task.add_done_callback(lambda done: self._greeting.pop(done, None))

    async def _greet(self, sock: socket.socket) -> None:
        """Give the connection its protocol, after the TLS handshake if there is one."""
        patience = None if self._context is None else self._limits.hello_seconds
        with contextlib.suppress(OSError):  # also what a failed handshake is
            await self._loop.connect_accepted_socket(self._make, sock, ssl=self._context, ssl_handshake_timeout=patience)

    def _drop(self, task: asyncio.Task[None]) -> None:
        _, sock = self._greeting.pop(task)
        task.cancel()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # the peer learns it at once, whoever closes the descriptor
        task.add_done_callback(lambda _: sock.close())  # in case that the task never ran
