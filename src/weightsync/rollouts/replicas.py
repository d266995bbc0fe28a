"""Which replicas take requests now, and which of them the next one goes to. Told from outside; never asks, never polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from weightsync.coordinator.status import Status
from weightsync.errors import ConfigurationError
from weightsync.model import FIRST_EPOCH

__all__ = ["Lease", "Replicas", "Urls"]

Urls = Mapping[str, str] | Callable[[str], str | None]
"""Where a replica of that name generates; ``None`` for one that this controller does not use."""

_HOLD_SECONDS = 0.05
_HOLD_MOST = 5.0


@dataclass
class _Replica:
    name: str
    url: str
    state: str = ""
    routable: bool = False
    version: int | None = None
    epoch: int = FIRST_EPOCH
    running: int = 0
    news: int = 0
    """Changes of state that were told."""
    used: int = 0
    """When it was taken last, as a count."""
    failures: int = 0
    """Requests in a row that were cut off with no news to explain it."""
    held: asyncio.TimerHandle | None = None
    """It cut a request off and nothing new was told since: not asked until then."""


@dataclass
class Lease:
    """One request's place at a replica."""

    name: str
    url: str
    version: int | None
    """What the coordinator says that it serves; tokens are stamped with what the server itself attests."""
    news: int = field(repr=False)
    epoch: int = FIRST_EPOCH
    """Of ``version``."""
    cut: bool = False
    """To be set if the request was cut off: the replica is left alone until there is news of it, or a while has passed."""


class Replicas:
    """A table of replicas. Used on one event loop; :meth:`apply` and :meth:`pausing` are told, :meth:`lease` waits for being told.

    ``on_change`` is called after each change.
    """

    def __init__(self, urls: Urls, on_change: Callable[[], None] = lambda: None) -> None:
        self._urls = urls if callable(urls) else urls.get
        self.on_change = on_change
        self.oldest = -1
        """Replicas that serve an older version than this are left alone, though they serve."""
        self.epoch = FIRST_EPOCH
        """The epoch of :attr:`oldest`: replicas that serve one before it are left alone, too."""
        self._table: dict[str, _Replica] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._count = 0

    @property
    def routable(self) -> bool:
        """Whether a request could be placed now."""
        return self._best() is not None

    @property
    def served(self) -> int | None:
        """The oldest version that a request could meet now; ``None`` where none can be placed."""
        return min((row.version for row in self._table.values() if self._serves(row) and row.version is not None), default=None)

    def running(self) -> dict[str, int]:
        """Requests under way, by replica."""
        return {name: row.running for name, row in self._table.items()}

    def apply(self, status: Status) -> None:
        """Take what the coordinator says of all replicas. Raises :class:`~weightsync.errors.ConfigurationError` for a wrong URL."""
        seen = set()
        for replica in status.replicas:
            url = self._urls(replica.name)
            if url is None:
                continue
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(f"{url!r} is not the URL of replica {replica.name}: write it as http://host:port")
            seen.add(replica.name)
            mine = self._table.setdefault(replica.name, _Replica(replica.name, url))
            epoch = replica.epoch or FIRST_EPOCH
            known = (url, replica.state, replica.routable, replica.version, epoch)
            if (mine.url, mine.state, mine.routable, mine.version, mine.epoch) != known:
                mine.url, mine.state, mine.routable, mine.version, mine.epoch = known
                self._told(mine)
        for name in self._table.keys() - seen:
            self.pausing(name)
            if not self._table[name].running:
                self._release(self._table.pop(name))
        self._changed()

    def pausing(self, name: str) -> None:
        """A replica is being paused, or is gone: nothing more is sent to it until the next :meth:`apply` says so."""
        mine = self._table.get(name)
        if mine is not None and mine.routable:
            mine.routable, mine.state = False, "updating"
            self._told(mine)
            self._changed()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """A place at the least loaded replica that takes requests; waits until there is one. Whoever asks bounds the wait."""
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
        """Forget all timers."""
        for mine in self._table.values():
            self._release(mine)

    def _serves(self, replica: _Replica) -> bool:
        return replica.routable and (replica.version is None or (replica.epoch, replica.version) >= (self.epoch, self.oldest))

    def _best(self) -> _Replica | None:
        free = [replica for replica in self._table.values() if self._serves(replica) and replica.held is None]
        return min(free, key=lambda replica: (replica.running, replica.used), default=None)

    def _told(self, mine: _Replica) -> None:
        mine.news, mine.failures = mine.news + 1, 0
        self._release(mine)

    def _hold(self, mine: _Replica) -> None:
        if mine.held is None:
            seconds = min(_HOLD_SECONDS * 2**mine.failures, _HOLD_MOST)
            mine.failures = min(mine.failures + 1, 16)
            mine.held = asyncio.get_running_loop().call_later(seconds, self._held_long_enough, mine)

    def _held_long_enough(self, mine: _Replica) -> None:
        self._release(mine)
        self._changed()

    def _release(self, mine: _Replica) -> None:
        if mine.held is not None:
            mine.held.cancel()
            mine.held = None

    def _changed(self) -> None:
        if self._best() is not None:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        self.on_change()
