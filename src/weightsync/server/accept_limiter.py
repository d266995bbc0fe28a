"""Accepts connections at a bounded rate, with few TLS handshakes at a time, so that a flood waits in the kernel's queue.

A connection that authenticates gives back its permit: a thousand agents that return at once are not slowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections import Counter
from ssl import SSLContext
from typing import cast

from starlette.types import ASGIApp

from weightsync.config import ServerSettings
from weightsync.server.connections import Connections
from weightsync.server.http_connection import HttpConnection

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2


class AcceptLimiter:
    """Accepts on ``listener`` from :meth:`open` to :meth:`aclose`, and serves ``app`` on each connection.

    Over TLS with ``context``. Used on the event loop only.
    """

    def __init__(
        self,
        listener: socket.socket,
        app: ASGIApp,
        settings: ServerSettings,
        connections: Connections,
        context: SSLContext | None = None,
    ) -> None:
        self._listener, self._app, self._settings, self._context = listener, app, settings, context
        self._connections, self._limits = connections, settings.limits
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._handshakes: dict[asyncio.Task[None], tuple[str, socket.socket]] = {}  # in order of arrival
        self._serving: dict[asyncio.Task[None], HttpConnection] = {}
        listener.setblocking(False)

    def open(self) -> None:
        """Accept connections from now on."""
        self._later = None
        self._loop.add_reader(self._listener.fileno(), self._ready)

    async def aclose(self, timeout: float) -> None:
        """Accept no more, drop unfinished handshakes, and wait for running requests; cancel them after ``timeout`` seconds.

        The caller closes the listener.
        """
        self._loop.remove_reader(self._listener.fileno())
        if self._later is not None:
            self._later.cancel()
        unfinished = list(self._handshakes)
        for task in unfinished:
            self._drop(task)
        if unfinished:
            await asyncio.wait(unfinished)
        for connection in self._serving.values():
            connection.close()
        for deadline in (timeout, None):
            if self._serving:
                await asyncio.wait(list(self._serving), timeout=deadline)
            for task in self._serving:
                task.cancel()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(seconds, self.open)

    def _ready(self) -> None:
        wait = self._connections.acquire()
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
        if len(self._handshakes) >= self._limits.unauthenticated:
            most, _ = Counter(host for host, _ in self._handshakes.values()).most_common(1)[0]
            self._drop(next(task for task, (host, _) in self._handshakes.items() if host == most))
        host = str(peer[0])
        task = asyncio.ensure_future(self._connect(sock, host))
        self._handshakes[task] = host, sock
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._serving.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection ended by an unexpected error", exc_info=error)

    async def _connect(self, sock: socket.socket, host: str) -> None:
        """Do the TLS handshake, if there is one, and serve the connection to its end."""
        reader = StreamReader()
        protocol = StreamReaderProtocol(reader)
        limit = None if self._context is None else self._limits.hello_seconds
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
            )
        except OSError:  # also what a failed handshake is
            return
        task = cast("asyncio.Task[None]", asyncio.current_task())  # that of _ready()
        self._handshakes.pop(task, None)
        writer = StreamWriter(transport, protocol, reader, self._loop)
        connection = self._serving[task] = HttpConnection(self._app, self._settings, reader, writer)
        self._connections.opened(transport, host)
        try:
            await connection.serve()
            writer.close()
            async with asyncio.timeout(self._limits.hello_seconds):
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass
        finally:
            transport.abort()
            self._connections.closed(transport)

    def _drop(self, task: asyncio.Task[None]) -> None:
        _, sock = self._handshakes.pop(task)
        task.cancel()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # the peer learns it at once, even if another thread closes the descriptor
        task.add_done_callback(lambda _: sock.close())  # in case that the task never ran
