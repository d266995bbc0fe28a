"""What happens in a coordinator, as typed events for whoever watches: a progress line, a dashboard, a test."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from weightsync.model import FIRST_EPOCH
from weightsync.protocol.messages import ReplicaResult, RoundResult

__all__ = [
    "Event",
    "Feed",
    "Joined",
    "Left",
    "ReplicaBytes",
    "ReplicaEnded",
    "ReplicaPhase",
    "RoundEnded",
    "RoundStarted",
    "Watcher",
]


class _Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all events: immutable, tagged with the class name."""


class Joined(_Event, frozen=True):
    """A rank is connected."""

    member: str


class Left(_Event, frozen=True):
    """A rank's connection is gone."""

    member: str
    reason: str


class RoundStarted(_Event, frozen=True):
    """A round began. ``number`` is the version that it publishes, or from which it re-seeds (``seeding``)."""

    round: int
    number: int
    replicas: tuple[str, ...]
    seeding: bool
    epoch: int = FIRST_EPOCH


class ReplicaPhase(_Event, frozen=True):
    """A replica entered a phase: agree, pause, move, verify, commit, quarantine."""

    round: int
    replica: str
    phase: str


class ReplicaBytes(_Event, frozen=True):
    """So many of the ``total`` bytes of the running move are in place, over the replica's ranks."""

    replica: str
    nbytes: int
    total: int


class ReplicaEnded(_Event, frozen=True):
    """The round is over for one replica; others may still be at work."""

    round: int
    result: ReplicaResult


class RoundEnded(_Event, frozen=True):
    """A round is over. ``result`` is ``None`` if no version came of it (``error`` says why)."""

    round: int
    result: RoundResult | None
    error: str | None = None


Event = Joined | Left | RoundStarted | ReplicaPhase | ReplicaBytes | ReplicaEnded | RoundEnded
Watcher = Callable[[Event], None]

_BACKLOG = 1024


class Feed:
    """Hands every event to every subscriber. A subscriber that falls behind loses the oldest events; nobody waits for it."""

    def __init__(self, backlog: int = _BACKLOG) -> None:
        self._backlog = backlog
        self._subscribers: dict[asyncio.Event, deque[Event]] = {}
        self._closed = False

    def emit(self, event: Event) -> None:
        """Never blocks."""
        for wake, queue in self._subscribers.items():
            queue.append(event)
            wake.set()

    def subscribe(self) -> AsyncIterator[Event]:
        """Events from this call on, until the feed is closed. Close the iterator (``aclosing``) when done with it earlier."""
        wake, queue = asyncio.Event(), deque[Event](maxlen=self._backlog)
        self._subscribers[wake] = queue
        return self._events(wake, queue)

    async def _events(self, wake: asyncio.Event, queue: deque[Event]) -> AsyncIterator[Event]:
        try:
            while True:
                while queue:
                    yield queue.popleft()
                if self._closed:
                    return
                wake.clear()
                await wake.wait()  # ends with the subscription: whoever iterates bounds it, or close() does
        finally:
            self._subscribers.pop(wake, None)

    def close(self) -> None:
        """End every subscription, after the events that it has not read yet."""
        self._closed = True
        for wake in self._subscribers:
            wake.set()
