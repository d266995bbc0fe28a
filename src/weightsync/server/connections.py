"""The number, the age and the arrival rate of connections that have not authenticated, all bounded.

A connection without the token costs as little as possible: it has a few seconds, there are only so many like it, and where there
are too many, the host that opened most loses its oldest one first. So a flood from one address mostly pushes out itself.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import TimerHandle

from weightsync.config import Limits

__all__ = ["Connections"]

_Peer = tuple[str, int]


class Connections:
    """All connections of one coordinator, by the address of the peer. Used on the coordinator's event loop only.

    Where each costs a TLS handshake (``encrypted``), half as many are taken in.
    """

    def __init__(self, limits: Limits, encrypted: bool = False) -> None:
        self._limits, self._cost = limits, 2.0 if encrypted else 1.0
        self._most = max(float(limits.unauthenticated), self._cost)
        self._transports: dict[_Peer, asyncio.WriteTransport] = {}
        self._unauthenticated: dict[str, dict[_Peer, TimerHandle]] = {}
        self._challenged: set[_Peer] = set()
        self._unproved = 0
        self._permits, self._since = self._most, time.monotonic()
        self.refused = 0
        """Connections that were cut because there were too many strangers, or because they took too long."""

    def __len__(self) -> int:
        return len(self._transports)

    @property
    def unauthenticated(self) -> int:
        """Connections that have not shown the token."""
        return self._unproved

    def acquire(self) -> float:
        """Take the turn of one more connection, or say in how many seconds there will be one."""
        now = time.monotonic()
        self._permits = min(self._most, self._permits + (now - self._since) * self._limits.arrivals)
        self._since = now
        if self._permits < self._cost:
            return (self._cost - self._permits) / self._limits.arrivals
        self._permits -= self._cost
        return 0.0

    def opened(self, transport: asyncio.WriteTransport, peer: _Peer) -> None:
        """Count a new connection; it is cut off if it has not authenticated in time."""
        while self._unproved >= self._limits.unauthenticated or (self._unproved and len(self) >= self._limits.connections):
            self._cut(self._dispensable())
        if len(self) >= self._limits.connections:
            self.refused += 1
            transport.abort()
            return
        self._transports[peer] = transport
        timer = asyncio.get_running_loop().call_later(self._limits.hello_seconds, self._cut, peer)
        self._unauthenticated.setdefault(peer[0], {})[peer] = timer
        self._unproved += 1

    def proved(self, peer: _Peer | None) -> None:
        """The connection of ``peer`` has shown the token."""
        if peer is not None and self._forget_unauthenticated((peer[0], peer[1])):
            self._permits += self._cost

    def may_stay(self, peer: _Peer | None) -> bool:
        """Whether this connection stays open after a challenge: of somebody known always, of a stranger once."""
        if peer is None:
            return False
        peer = peer[0], peer[1]
        if peer not in self._unauthenticated.get(peer[0], {}):
            return peer in self._transports
        first = peer not in self._challenged
        self._challenged.add(peer)
        return first

    def closed(self, transport: asyncio.WriteTransport, peer: _Peer) -> None:
        """Forget a connection that has ended, if it was not cut off before."""
        if self._transports.get(peer) is transport:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        self._transports.pop(peer, None)
        self._forget_unauthenticated(peer)

    def _forget_unauthenticated(self, peer: _Peer) -> bool:
        host = self._unauthenticated.get(peer[0], {})
        timer = host.pop(peer, None)
        self._challenged.discard(peer)
        if timer is not None:
            timer.cancel()
            self._unproved -= 1
        if not host:
            self._unauthenticated.pop(peer[0], None)
        return timer is not None

    def _dispensable(self) -> _Peer:
        """The oldest stranger of the host that has most of them."""
        most: dict[_Peer, TimerHandle] = max(self._unauthenticated.values(), key=len)
        return next(iter(most))

    def _cut(self, peer: _Peer) -> None:
        self.refused += 1
        transport = self._transports.get(peer)
        self._forget(peer)
        if transport is not None:
            transport.abort()
