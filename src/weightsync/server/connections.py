"""The number, the age and the arrival rate of connections that have not authenticated, all bounded.

A connection without the token costs as little as possible: it has a few seconds, and there is only a bounded number of them. When
there are too many, the host with most of them loses its oldest. A flood from one address therefore mostly pushes out itself.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle, WriteTransport
from collections import Counter

from weightsync.config import Limits
from weightsync.server.allowance import RateAllowance

_HANDSHAKE = 5.0  # permits for a connection over TLS: its handshake takes the event loop a millisecond or two
_HANDSHAKES = 16  # at once; those of agents give their permits back


class Connections:
    """All connections of one coordinator, by their transports. Used on the coordinator's event loop only.

    An address does not identify a connection: on a machine with two addresses, one port of a peer can have a connection to each.
    Where each connection costs a TLS handshake (``encrypted``), a fifth as many are accepted, and few at once.
    """

    def __init__(self, limits: Limits, encrypted: bool = False) -> None:
        self._limits, self._cost = limits, _HANDSHAKE if encrypted else 1.0
        burst = _HANDSHAKES * _HANDSHAKE if encrypted else limits.unauthenticated
        self._permits = RateAllowance(limits.arrivals, max(float(min(limits.unauthenticated, burst)), self._cost))
        self._all: set[WriteTransport] = set()
        self._unauthenticated: dict[WriteTransport, tuple[str, TimerHandle]] = {}  # in order of arrival
        self._challenged: set[WriteTransport] = set()
        self.refused = 0
        """Connections that were closed because there were too many without the token, or because they took too long."""

    def __len__(self) -> int:
        return len(self._all)

    def acquire(self) -> float:
        """Take a permit for one more connection, or return in how many seconds there will be one."""
        wait = self._permits.early(self._cost)
        if not wait:
            self._permits.take(self._cost)
        return wait

    def opened(self, transport: WriteTransport, host: str) -> None:
        """Count a new connection from ``host``. It is closed if it does not authenticate in time."""
        while self._unauthenticated and (
            len(self._unauthenticated) >= self._limits.unauthenticated or len(self) >= self._limits.connections
        ):
            self._cut(self._dispensable())
        if len(self) >= self._limits.connections:
            self.refused += 1
            transport.abort()
            return
        timer = asyncio.get_running_loop().call_later(self._limits.hello_seconds, self._cut, transport)
        self._all.add(transport)
        self._unauthenticated[transport] = host, timer

    def proved(self, transport: WriteTransport | None) -> None:
        """Take note that a connection has shown the token, and give back its permit."""
        if transport is not None and self._authenticated(transport):
            self._permits.take(-self._cost)

    def may_stay(self, transport: WriteTransport | None) -> bool:
        """Whether a connection stays open after a challenge: always if it has authenticated, else once."""
        if transport not in self._unauthenticated:
            return transport in self._all
        first = transport not in self._challenged
        self._challenged.add(transport)
        return first

    def closed(self, transport: WriteTransport) -> None:
        """Drop a connection that has ended. Safe twice."""
        self._all.discard(transport)
        self._authenticated(transport)

    def _authenticated(self, transport: WriteTransport) -> bool:
        """Stop counting it among those without the token. Returns whether it was one."""
        self._challenged.discard(transport)
        entry = self._unauthenticated.pop(transport, None)
        if entry is not None:
            entry[1].cancel()
        return entry is not None

    def _dispensable(self) -> WriteTransport:
        """The oldest connection without the token of the host that has most of them."""
        most, _ = Counter(host for host, _ in self._unauthenticated.values()).most_common(1)[0]
        return next(transport for transport, (host, _) in self._unauthenticated.items() if host == most)

    def _cut(self, transport: WriteTransport) -> None:
        self.refused += 1
        self.closed(transport)
        transport.abort()
