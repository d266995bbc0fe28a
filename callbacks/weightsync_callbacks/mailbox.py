"""Mailbox: a numbered list of messages that is pushed to followers at least once. Carries rollout completions and orders.

A follower names the last number that it received, so a new connection continues after the lost one. A message that is posted
twice, because its sender lost the response, keeps its number. The ``epoch`` changes when the coordinator restarts. Numbers then
start again at 1.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import msgspec

from weightsync.errors import ConfigurationError, MembershipError

_ENTRIES = 1 << 16
_BYTES = 256 << 20
_REMEMBERED = 1 << 17


class Full(Exception):
    """The mailbox holds too many unacknowledged messages. The request may be repeated later."""


class Post(msgspec.Struct, frozen=True):
    """A message to add: a unique id chosen by the sender, and JSON content."""

    id: str
    content: msgspec.Raw


class Signal(msgspec.Struct, frozen=True):
    """Notification of a message. Its content is fetched separately, by its number."""

    epoch: str
    number: int
    id: str


class Mailbox:
    """Holds at most ``entries`` messages of ``nbytes`` bytes in total until they are acknowledged. Not thread-safe."""

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
        """Add messages and return their numbers. A message whose id is known keeps its number.

        Raises:
            Full: There is no room for all of them. None is added.
        """
        fresh: dict[str, bytes] = {}
        for post in posts:
            if post.id not in self._numbers:
                fresh.setdefault(post.id, bytes(post.content))
        nbytes = sum(len(content) for content in fresh.values())
        if len(self._held) + len(fresh) > self._most_entries or self._bytes + nbytes > self._most_bytes:
            raise Full(f"{len(self._held)} messages of {self._bytes} bytes have not been acknowledged yet")
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
        """Return the content of a message.

        Raises:
            MembershipError: There is no such message, or it was acknowledged.
        """
        if epoch != self.epoch or number not in self._held:
            raise MembershipError(f"message {number} does not exist: it was acknowledged, or the coordinator was restarted")
        return self._held[number][1]

    def acknowledge(self, epoch: str, upto: int) -> None:
        """Delete all messages up to number ``upto``. Does nothing for an earlier epoch.

        Raises:
            ConfigurationError: No message has this number yet.
        """
        if epoch != self.epoch:
            return  # from before a restart
        if not 0 <= upto <= self._last:
            raise ConfigurationError(f"message {upto} was never sent; the last is {self._last}")
        for number in range(self._acknowledged + 1, upto + 1):
            entry = self._held.pop(number, None)
            self._bytes -= 0 if entry is None else len(entry[1])
        self._acknowledged = max(self._acknowledged, upto)

    def withdraw(self, number: int) -> None:
        """Delete one message. Idempotent."""
        entry = self._held.pop(number, None)
        self._bytes -= 0 if entry is None else len(entry[1])

    async def follow(self, epoch: str, after: int) -> AsyncIterator[list[Signal]]:
        """Yield the signals of all messages after number ``after``, then new ones as they arrive, until the mailbox is closed."""
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
                await wake.wait()  # ended by close(), or cancelled with the follower's connection
        finally:
            self._followers.discard(wake)

    def _after(self, at: int) -> list[Signal]:
        """Return the signals of held messages with numbers above ``at``."""
        # For a new follower, the held messages are far fewer than all numbers.
        fresh = range(at + 1, self._last + 1)
        numbers = fresh if len(fresh) <= len(self._held) else (number for number in self._held if number > at)
        return [self._held[number][0] for number in numbers if number in self._held]

    def close(self) -> None:
        """End all iterations of :meth:`follow`."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for wake in self._followers:
            wake.set()
