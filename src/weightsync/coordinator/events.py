"""Typed events of a coordinator, for progress lines, dashboards and tests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from weakref import WeakKeyDictionary

import msgspec

from weightsync.model import FIRST_EPOCH
from weightsync.protocol.messages import ReplicaResult, RoundResult


class _Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all events: immutable, tagged with the class name."""


class Joined(_Event, frozen=True):
    """A rank connected."""

    member: str


class Left(_Event, frozen=True):
    """A rank's connection closed."""

    member: str
    reason: str


class RoundStarted(_Event, frozen=True):
    """A round started. ``number`` is the version that it publishes or, if ``seeding``, the published version that it redelivers."""

    round: int
    number: int
    replicas: tuple[str, ...]
    seeding: bool
    epoch: int = FIRST_EPOCH


class ReplicaPhase(_Event, frozen=True):
    """A replica entered a phase: agree, stage, wait, drain, pause, move, verify, commit, revert, quarantine."""

    round: int
    replica: str
    phase: str


class ReplicaBytes(_Event, frozen=True):
    """``nbytes`` of ``total`` bytes of the running move are in place, summed over the replica's ranks."""

    replica: str
    nbytes: int
    total: int


class ReplicaEnded(_Event, frozen=True):
    """The round ended for one replica. Other replicas may still be updating."""

    round: int
    result: ReplicaResult


class RoundEnded(_Event, frozen=True):
    """A round ended. ``result`` is ``None`` if the round produced no version; ``error`` then says why."""

    round: int
    result: RoundResult | None
    error: str | None = None
    seeding: bool = False
    seconds: float = 0.0
    """Duration of the round."""
    queued: float = 0.0
    """Seconds that it waited for earlier rounds."""


class Audited(_Event, frozen=True):
    """All ranks of a replica that serves read their parameters again, or one found in them what was not installed: ``error``.

    Then ``seconds`` are those since the look began, or 0 if it was found otherwise.
    """

    replica: str
    seconds: float
    error: str | None = None


Event = Joined | Left | RoundStarted | ReplicaPhase | ReplicaBytes | ReplicaEnded | RoundEnded | Audited
Watcher = Callable[[Event], None]

_BACKLOG = 1024


class Feed:
    """Delivers every event to every subscriber. A slow subscriber loses its oldest events; the publisher never blocks."""

    def __init__(self) -> None:
        # Weak: an iterator that ends before it begins runs no code, also none that would remove it from here.
        self._subscribers: WeakKeyDictionary[asyncio.Event, deque[Event]] = WeakKeyDictionary()
        self._closed = False

    def emit(self, event: Event) -> None:
        """Queue ``event`` for every subscriber. Never blocks."""
        for wake, queue in self._subscribers.items() if self._subscribers else ():
            queue.append(event)
            wake.set()

    def subscribe(self) -> AsyncIterator[Event]:
        """Iterate over events from this call on, until the feed is closed.

        To end the subscription earlier, close the iterator (``contextlib.aclosing``).
        """
        wake, queue = asyncio.Event(), deque[Event](maxlen=_BACKLOG)
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
                await wake.wait()  # bounded by the subscriber, or by close()
        finally:
            self._subscribers.pop(wake, None)

    def close(self) -> None:
        """End every subscription once it has delivered its queued events."""
        self._closed = True
        for wake in self._subscribers:
            wake.set()
