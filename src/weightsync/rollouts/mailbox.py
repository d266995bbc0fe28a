"""A numbered list of messages that is pushed to whoever follows it, at least once: what rollout completions and orders travel by.

A follower says the last number that it has, so that a connection that broke is gone on with where it ended. A message that is
posted twice (its sender lost the answer) has one number. The ``epoch`` changes when the coordinator restarts: numbers begin anew
then.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import msgspec

from weightsync.errors import ConfigurationError, MembershipError

__all__ = ["Full", "Mailbox", "Post", "Signal"]

_ENTRIES = 1 << 16
_BYTES = 256 << 20
_REMEMBERED = 1 << 17


class Full(Exception):
    """Too much waits to be acknowledged; another time."""


class Post(msgspec.Struct, frozen=True):
    """A message to be put in: its sender's own, unique id, and any JSON."""

    id: str
    content: msgspec.Raw


class Signal(msgspec.Struct, frozen=True):
    """That a message is there. Its content is fetched apart, by its number."""

    epoch: str
    number: int
    id: str


class Mailbox:
    """Used on one event loop. Holds at most ``entries`` messages of ``nbytes`` bytes until they are acknowledged."""

    def __init__(self, entries: int = _ENTRIES, nbytes: int = _BYTES) -> None:
        self.epoch = uuid.uuid4().hex
        self._most_entries, self._most_bytes = entries, nbytes
        self._held: dict[int, tuple[Signal, bytes]] = {}
        self._bytes = 0
        self._last = self._acknowledged = 0
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._followers: set[asyncio.Event] = set()
        self._closed = False

    def put(self, posts: Sequence[Post]) -> list[int]:
        """Their numbers; the old ones of those that are known. All or none: raises :class:`Full`."""
        fresh: dict[str, bytes] = {}
        for post in posts:
            if post.id not in self._numbers:
                fresh.setdefault(post.id, bytes(post.content))
        nbytes = sum(len(content) for content in fresh.values())
        if len(self._held) + len(fresh) > self._most_entries or self._bytes + nbytes > self._most_bytes:
            raise Full(f"{len(self._held)} messages of {self._bytes} bytes wait to be acknowledged already")
        for name, content in fresh.items():
            self._last += 1
            self._numbers[name] = self._last
            self._held[self._last] = Signal(self.epoch, self._last, name), content
        self._bytes += nbytes
        numbers = [self._numbers[post.id] for post in posts]
        while len(self._numbers) > _REMEMBERED:
            self._numbers.popitem(last=False)
        if fresh:
            self._wake()
        return numbers

    def content(self, number: int, epoch: str) -> bytes:
        """What was posted. Raises :class:`~weightsync.errors.MembershipError` if it is not there, or not any more."""
        if epoch != self.epoch or number not in self._held:
            raise MembershipError(f"there is no message {number}: it was acknowledged, or the coordinator was restarted")
        return self._held[number][1]

    def acknowledge(self, epoch: str, upto: int) -> None:
        """Forget messages up to this number. Raises :class:`~weightsync.errors.ConfigurationError` for those not there yet."""
        if epoch != self.epoch:
            return  # of an earlier life
        if not 0 <= upto <= self._last:
            raise ConfigurationError(f"message {upto} was never sent; the last is {self._last}")
        for number in range(self._acknowledged + 1, upto + 1):
            entry = self._held.pop(number, None)
            self._bytes -= 0 if entry is None else len(entry[1])
        self._acknowledged = max(self._acknowledged, upto)

    def withdraw(self, number: int) -> None:
        """Forget one message; nothing happens if it is gone already."""
        entry = self._held.pop(number, None)
        self._bytes -= 0 if entry is None else len(entry[1])

    async def follow(self, epoch: str, after: int) -> AsyncIterator[list[Signal]]:
        """What is there after ``after``, and then what comes, as often as something does; ends when the mailbox is closed."""
        at = max(after if epoch == self.epoch else 0, self._acknowledged)
        wake = asyncio.Event()
        self._followers.add(wake)
        try:
            while not self._closed:
                at = max(at, self._acknowledged)
                signals = self._after(at)
                at = self._last
                if signals:
                    yield signals
                    continue
                wake.clear()
                await wake.wait()  # ends with the mailbox, or with the connection of who follows
        finally:
            self._followers.discard(wake)

    def _after(self, at: int) -> list[Signal]:
        """What is held with a higher number. A follower that is new looks at what is held, not at all numbers that ever were."""
        fresh = range(at + 1, self._last + 1)
        numbers = fresh if len(fresh) <= len(self._held) else (number for number in self._held if number > at)
        return [self._held[number][0] for number in numbers if number in self._held]

    def close(self) -> None:
        """End everybody's following."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for wake in self._followers:
            wake.set()
