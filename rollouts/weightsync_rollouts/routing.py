"""Routing of requests to replicas. States are pushed by the caller; this module neither requests nor polls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from weightsync.coordinator.status import Status
from weightsync.errors import ConfigurationError
from weightsync.model import FIRST_EPOCH

Urls = Mapping[str, str] | Callable[[str], str | None]
"""URL at which the replica of that name generates; ``None`` if this controller does not use it."""

_HOLD_SECONDS = 0.05
_HOLD_MOST = 5.0


@dataclass
class _RoutedReplica:
    name: str
    url: str
    state: str = ""
    routable: bool = False
    version: int | None = None
    epoch: int = FIRST_EPOCH
    running: int = 0
    news: int = 0
    """Number of state changes reported."""
    used: int = 0
    """Count of leases at its last lease, to prefer the least recently used."""
    failures: int = 0
    """Consecutive requests that were interrupted without a state change that explains it."""
    held: asyncio.TimerHandle | None = None
    """Timer until it is used again, after it interrupted a request without a state change."""


@dataclass
class Lease:
    """Lease of a replica for one request."""

    name: str
    url: str
    version: int | None
    """Version that the coordinator reports. The versions of tokens are those that the server reports."""
    news: int = field(repr=False)
    epoch: int = FIRST_EPOCH
    """Epoch of ``version``."""
    cut: bool = False
    """Set by the user if the request was interrupted. The replica then gets no requests until its state changes or a timer ends."""


class Replicas:
    """Table of replicas. Not thread-safe: used on one event loop.

    :meth:`apply` and :meth:`pausing` report changes. :meth:`lease` waits for them.

    Args:
        urls: URL of each replica.
        on_change: Called after each change.
    """

    def __init__(self, urls: Urls, on_change: Callable[[], None] = lambda: None) -> None:
        self._urls = urls if callable(urls) else urls.get
        self.on_change = on_change
        self.oldest = -1
        """Oldest version that a replica must serve to get requests."""
        self.epoch = FIRST_EPOCH
        """Epoch of :attr:`oldest`. Replicas that serve a version of an earlier epoch get no requests."""
        self._table: dict[str, _RoutedReplica] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._count = 0

    @property
    def routable(self) -> bool:
        """Whether a replica can take a request now."""
        return self._best() is not None

    @property
    def served(self) -> int | None:
        """Oldest version that a request may meet now; ``None`` if no replica can take a request."""
        return min((row.version for row in self._table.values() if self._serves(row) and row.version is not None), default=None)

    def running(self) -> dict[str, int]:
        """Return the number of running requests by replica."""
        return {name: row.running for name, row in self._table.items()}

    def apply(self, status: Status) -> None:
        """Update the table from a coordinator status.

        Raises:
            ConfigurationError: The URL of a replica is invalid.
        """
        seen = set()
        for replica in status.replicas:
            url = self._urls(replica.name)
            if url is None:
                continue
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(f"{url!r} is not the URL of replica {replica.name}: write it as http://host:port")
            seen.add(replica.name)
            mine = self._table.setdefault(replica.name, _RoutedReplica(replica.name, url))
            epoch = replica.epoch or FIRST_EPOCH
            known = (url, replica.state, replica.routable, replica.version, epoch)
            if (mine.url, mine.state, mine.routable, mine.version, mine.epoch) != known:
                mine.url, mine.state, mine.routable, mine.version, mine.epoch = known
                self._state_changed(mine)
        for name in self._table.keys() - seen:
            self.pausing(name)
            if not self._table[name].running:
                self._release(self._table.pop(name))
        self._changed()

    def pausing(self, name: str) -> None:
        """Report that a replica is being paused or has left. It gets no requests until the next :meth:`apply` allows it."""
        mine = self._table.get(name)
        if mine is not None and mine.routable:
            mine.routable, mine.state = False, "updating"
            self._state_changed(mine)
            self._changed()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Lease the least loaded replica that takes requests. Waits for one without a time limit of its own."""
        while (mine := self._best()) is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)
        self._count += 1
        mine.running, mine.used = mine.running + 1, self._count
        lease = Lease(mine.name, mine.url, mine.version, mine.news, mine.epoch)
        try:
            yield lease
        finally:
            mine.running -= 1
            if not lease.cut:
                mine.failures = 0
            elif lease.news == mine.news:
                self._hold(mine)

    def close(self) -> None:
        """Cancel all timers."""
        for mine in self._table.values():
            self._release(mine)

    def _serves(self, replica: _RoutedReplica) -> bool:
        return replica.routable and (replica.version is None or (replica.epoch, replica.version) >= (self.epoch, self.oldest))

    def _best(self) -> _RoutedReplica | None:
        free = [replica for replica in self._table.values() if self._serves(replica) and replica.held is None]
        return min(free, key=lambda replica: (replica.running, replica.used), default=None)

    def _state_changed(self, mine: _RoutedReplica) -> None:
        mine.news, mine.failures = mine.news + 1, 0
        self._release(mine)

    def _hold(self, mine: _RoutedReplica) -> None:
        if mine.held is None:
            seconds = min(_HOLD_SECONDS * 2**mine.failures, _HOLD_MOST)
            mine.failures = min(mine.failures + 1, 16)
            mine.held = asyncio.get_running_loop().call_later(seconds, self._hold_ended, mine)

    def _hold_ended(self, mine: _RoutedReplica) -> None:
        self._release(mine)
        self._changed()

    def _release(self, mine: _RoutedReplica) -> None:
        if mine.held is not None:
            mine.held.cancel()
            mine.held = None

    def _changed(self) -> None:
        if self._best() is not None:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        self.on_change()
