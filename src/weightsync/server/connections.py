"""Connections to the coordinator before and after they have shown the token, and uvicorn's protocols that report them.

Until somebody has shown the token, its connection costs as little as it can: it has a few seconds, there are only so many like it,
and where there are too many, those who opened most lose theirs first. So a flood from one address mostly pushes out itself.
"""

from __future__ import annotations

import logging
import time
from asyncio import AbstractEventLoop, BaseTransport, TimerHandle, Transport
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from weightsync.config import Limits

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
    from uvicorn.server import ServerState
    from websockets.frames import Frame as WebSocketFrame

__all__ = ["AgentProtocol", "Config", "Connections", "HttpProtocol"]

# At DEBUG the WebSocket library would log headers and frames: the bearer token, and data keys. Below ERROR uvicorn has a line for
# each connection that is not HTTP, which would let strangers fill the log.
_wire_log = logging.getLogger("weightsync.server.wire")
_wire_log.setLevel(logging.ERROR)

_log = logging.getLogger(__name__)

_Peer = tuple[str, int]
_FRAMES = 4096.0  # frames that are no whole message (fragments, pings, pongs) from one agent at once
_FRAMES_A_SECOND = 100.0  # and on and on; an agent of ours sends a few a minute, and never a fragment


class Connections:
    """All connections of one coordinator, by the address of the peer. Used on the coordinator's event loop only.

    Where each costs a TLS handshake (``encrypted``), half as many are taken in.
    """

    def __init__(self, limits: Limits, encrypted: bool = False) -> None:
        self._limits, self._cost = limits, 2.0 if encrypted else 1.0
        self._most = max(float(limits.strangers), self._cost)
        self._transports: dict[_Peer | None, Transport] = {}
        self._strangers: dict[str, dict[_Peer, TimerHandle]] = {}
        self._challenged: set[_Peer] = set()
        self._unproved = 0
        self._turns, self._since = self._most, time.monotonic()
        self.refused = 0
        """Connections that were cut because there were too many strangers, or because they took too long."""

    def __len__(self) -> int:
        return len(self._transports)

    @property
    def strangers(self) -> int:
        """Connections that have not shown the token."""
        return self._unproved

    def turn(self) -> float:
        """Take the turn of one more connection, or say in how many seconds there will be one."""
        now = time.monotonic()
        self._turns = min(self._most, self._turns + (now - self._since) * self._limits.arrivals)
        self._since = now
        if self._turns < self._cost:
            return (self._cost - self._turns) / self._limits.arrivals
        self._turns -= self._cost
        return 0.0

    def opened(self, transport: Transport, peer: _Peer | None, loop: AbstractEventLoop) -> None:
        """A stranger came; it is sent away again if it has not shown the token in time."""
        if peer is None:
            return  # not a network connection
        while self._unproved >= self._limits.strangers or (self._unproved and len(self) >= self._limits.connections):
            self._cut(self._dispensable())
        if len(self) >= self._limits.connections:
            self.refused += 1
            transport.abort()
            return
        self._transports[peer] = transport
        timer = loop.call_later(self._limits.hello_seconds, self._cut, peer)
        self._strangers.setdefault(peer[0], {})[peer] = timer
        self._unproved += 1

    def proved(self, peer: _Peer | None) -> None:
        """The connection of ``peer`` has shown the token."""
        if peer is not None and self._forget_stranger((peer[0], peer[1])):
            self._turns += self._cost

    def may_stay(self, peer: _Peer | None) -> bool:
        """Whether this connection stays open after a challenge: of somebody known always, of a stranger once."""
        if peer is None:
            return False
        peer = peer[0], peer[1]
        if peer not in self._strangers.get(peer[0], {}):
            return peer in self._transports
        first = peer not in self._challenged
        self._challenged.add(peer)
        return first

    def closed(self, peer: _Peer | None) -> None:
        """The connection is gone."""
        if peer is not None and self._transports.pop(peer, None) is not None:
            self._forget_stranger(peer)

    def _forget_stranger(self, peer: _Peer) -> bool:
        host = self._strangers.get(peer[0], {})
        timer = host.pop(peer, None)
        self._challenged.discard(peer)
        if timer is not None:
            timer.cancel()
            self._unproved -= 1
        if not host:
            self._strangers.pop(peer[0], None)
        return timer is not None

    def _dispensable(self) -> _Peer:
        """The oldest stranger of the host that has most of them."""
        most: dict[_Peer, TimerHandle] = max(self._strangers.values(), key=len)
        return next(iter(most))

    def _cut(self, peer: _Peer) -> None:
        self.refused += 1
        transport = self._transports.get(peer)
        self.closed(peer)
        if transport is not None:
            transport.abort()


class Config(uvicorn.Config):
    """Uvicorn's configuration, which it hands to every connection, with where connections are counted."""

    def __init__(self, app: Any, connections: Connections, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own types
        super().__init__(app, http=HttpProtocol, ws=AgentProtocol, **options)
        self.connections = connections


class HttpProtocol(H11Protocol):
    """Uvicorn's HTTP connections, counted, and silent about strangers."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: AbstractEventLoop | None = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _wire_log
        self.access_log = False
        self._counted = cast("Config", config).connections

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        self._counted.opened(transport, self.client, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._counted.closed(self.client)
        super().connection_lost(exc)


class AgentProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's agents' sockets with a log of our own, quiet refusals, and an end for peers that stopped answering.

    Uvicorn gives its logger to the WebSocket library, which at DEBUG writes every header and frame into it. Whoever embeds a
    coordinator in a server of uvicorn's may set that level, and the bearer token would be in its log.
    """

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: AbstractEventLoop | None = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = self.conn.logger = _wire_log
        self.conn.debug = False
        self._counted = cast("Config", config).connections
        self._peer: _Peer | None = None
        self._frames_left, self._since = _FRAMES, time.monotonic()
        self._dropped = False

    def connection_made(self, transport: BaseTransport) -> None:
        """See :class:`asyncio.Protocol`; the connection was counted when it was HTTP."""
        super().connection_made(transport)
        self._peer = get_remote_addr(cast("Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._counted.closed(self._peer)
        super().connection_lost(exc)

    async def send(self, message: ASGISendEvent) -> None:
        """Send one event of the application."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # by a refusal; without this uvicorn takes it for an application that forgot to answer

    def pause_writing(self) -> None:
        """Read nothing from a peer that does not read: what it makes us answer would fill our memory."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """See :meth:`pause_writing`."""
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        """The next event for the application."""
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    def handle_events(self) -> None:
        """Take in what arrived, unless there is too much of what is no message."""
        if not self._dropped:
            super().handle_events()

    def handle_ping(self) -> None:
        """Answer, unless the peer does not read its answers."""
        if self._count_frame() and self.writable.is_set():
            super().handle_ping()

    def handle_pong(self, event: WebSocketFrame) -> None:
        """See :meth:`handle_ping`."""
        if self._count_frame():
            super().handle_pong(event)

    def handle_cont(self, event: WebSocketFrame) -> None:
        """A fragment, but for the first of a message: empty ones would count for no byte of its limit."""
        if self._count_frame():
            super().handle_cont(event)

    def _count_frame(self) -> bool:
        """Whether the peer may send one more frame that is no whole message; if not, it is dropped."""
        if self._dropped:
            return False
        now = time.monotonic()
        self._frames_left = min(_FRAMES, self._frames_left + (now - self._since) * _FRAMES_A_SECOND) - 1
        self._since = now
        if self._frames_left >= 0:
            return True
        self._dropped = True
        self.frames = []
        _log.warning("dropped the agent at %s: it sent thousands of fragments, pings or pongs", self._peer and self._peer[0])
        self.transport.abort()
        return False

    def keepalive_timeout(self) -> None:
        """Drop a peer that missed its pong at once, even if bytes that it does not read are still queued for it."""
        super().keepalive_timeout()
        self.transport.abort()
