"""Replicas that are ready for a round, and a wait until enough of them are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from weightsync.config import Require
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publish_barrier import RETURN_SECONDS
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.deadline import within
from weightsync.errors import Aborted, ManifestMismatch, MembershipError
from weightsync.protocol.messages import WaitForReplicas
from weightsync.protocol.notices import reminding

_SHOWN = 4
_MOST_WAITS = 8  # of one rank at one time


class Attendance:
    """Counts the replicas that are complete and match the trainer's manifest. The caller reports changes; nothing is polled."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._news = asyncio.Event()
        self._ready: frozenset[str] | None = None
        self._waits: Counter[str] = Counter()
        self._closed = False

    def close(self) -> None:
        """End the waits for a whole replica. Safe twice."""
        self._closed = True
        self.changed()

    def changed(self) -> None:
        """Record that a rank joined or left, and wake all waiters."""
        self._ready = None
        self._news.set()
        self._news = asyncio.Event()

    def ready(self) -> frozenset[str]:
        """Names of the replicas that a round can update now. All waiters share what is found once after each change."""
        if self._ready is None:
            self._ready = frozenset(replica.name for replica in self._members.taking_part() if replica.complete)
        return self._ready

    async def wait(self, link: RankHandle[TrainerRank], asked: WaitForReplicas, limit: RoundDeadline) -> tuple[str, ...]:
        """Wait until the replicas that the rank of ``link`` asked for are ready. It is told now and then which are missing.

        Returns:
            The names of all replicas that are ready, sorted.

        Raises:
            MembershipError: The rank waits too often already.
            ManifestMismatch: A replica is refused, and the rank asked to hear of that.
            DeadlineExceeded: ``limit`` passed. The message lists the ready replicas and what the others lack.
        """
        member, count, wanted = link.member, asked.count, frozenset(asked.names)
        if self._waits[member] >= _MOST_WAITS:
            raise MembershipError(f"{member} waits for replicas {_MOST_WAITS} times already: end another wait first")
        self._waits[member] += 1
        try:
            with reminding(lambda: link.node.notify(f"waiting for {self._wanted(count, wanted)}")):
                while len(self.ready()) < count or not wanted <= self.ready():
                    refused = [replica for replica in self._members.replicas.values() if replica.links and replica.refusal]
                    if refused and asked.refused == "raise":
                        raise ManifestMismatch(_lack(refused[0]))
                    await self._next(limit, lambda: self._wanted(count, wanted))
        finally:
            self._waits -= Counter((member,))  # and forgets what is zero
        return tuple(sorted(self.ready()))

    async def whole(self, timeout: float) -> Replica:
        """Return a replica whose ranks are all connected, and whose tensors are known, when there is one. No trainer is needed.

        Raises:
            ManifestMismatch: Two such replicas hold different tensors. The message names both.
            DeadlineExceeded: ``timeout`` seconds passed.
            Aborted: The coordinator was closed.
        """
        replicas, limit = self._members.replicas, RoundDeadline(timeout)
        while not self._closed:
            whole = [replica for replica in replicas.values() if replica.complete and not replica.takes_any]
            for other in whole[1:]:
                whole[0].manifest.check_same(other.manifest, f"replica {other.name}, unlike replica {whole[0].name},")
            if whole:
                return whole[0]
            await self._next(limit, lambda: f"a whole replica with tensors; there are: {', '.join(replicas) or 'none'}")
        raise Aborted("the coordinator is closed")

    async def _next(self, limit: RoundDeadline, wanted: Callable[[], str]) -> None:
        """Wait for the next change. An error says what was ``wanted``."""
        async with within(limit.left, lambda: f"waited {limit.seconds:.3g} s for {wanted()}"):
            await self._news.wait()

    async def returned(self, require: Require, seconds: float) -> None:
        """Wait until a round can satisfy ``require``, if replicas that it needs have just lost their connection.

        Such a replica is waited for as long as a trainer rank keeps its place: :data:`RETURN_SECONDS` after the loss.

        Args:
            require: What the round needs.
            seconds: The longest wait.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (until := min(end, self._returning_until(require))) > loop.time():
            news = self._news
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await news.wait()

    def _returning_until(self, require: Require) -> float:
        """Event loop's time until which enough replicas may return to satisfy ``require``; 0 if none need to, or too few can."""
        ready = self.ready()
        known = [replica for replica in self._members.replicas.values() if not replica.departed]
        wanted = max(1, len(known)) if require == "all" else 1 if require == "any" else require
        lost = [replica for replica in known if replica.name not in ready and replica.refusal is None]
        until = sorted(replica.vanished_at + RETURN_SECONDS for replica in lost if replica.vanished_at is not None)
        lacking = wanted - len(ready)
        return until[-lacking] if 0 < lacking <= len(until) else 0.0

    def _wanted(self, count: int, names: frozenset[str]) -> str:
        ready = self.ready()
        others = [_lack(replica) for _, replica in sorted(self._members.replicas.items()) if replica.name not in ready]
        known = [f"ready: {', '.join(sorted(ready)) or 'none'}", *(line for line in others if line)]
        wanted = ", ".join(sorted(names)[:_SHOWN]) or f"{count} replica{'s' if count != 1 else ''}"
        return f"{wanted} ({'; '.join(known)})"


def _lack(replica: Replica) -> str:
    if replica.departed:
        return ""
    if not replica.links:
        return f"{replica.name} is lost: {replica.error}"
    if replica.refusal is not None:
        return f"{replica.name} is refused: {replica.refusal}"
    return f"{replica.name} is missing rank {', '.join(map(str, replica.missing))} of {replica.world_size}"
