"""Replicas that are ready for a round, and a wait until enough of them are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from weightsync.coordinator.membership import Membership
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.coordinator.replicas import Replica
from weightsync.errors import DeadlineExceeded
from weightsync.protocol.notices import reminding

__all__ = ["Attendance"]

_SHOWN = 4


class Attendance:
    """Counts the replicas that are complete and match the trainer's manifest. The caller reports changes; nothing is polled."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._news = asyncio.Event()

    def changed(self) -> None:
        """Record that a rank joined or left, and wake all waiters."""
        self._news.set()
        self._news = asyncio.Event()

    def ready(self) -> tuple[str, ...]:
        """Names of the replicas that a round can update now, sorted."""
        return tuple(sorted(replica.name for replica in self._members.taking_part() if replica.complete))

    async def wait(
        self, count: int, limit: RoundDeadline, notify: Callable[[str], None], names: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Wait until at least ``count`` replicas are ready, and those of ``names`` among them.

        Args:
            count: Number of replicas to wait for.
            limit: Deadline of the wait.
            notify: Receives a text now and then that says which replicas are still missing.
            names: Replicas to wait for.

        Returns:
            The names of all replicas that are ready.

        Raises:
            DeadlineExceeded: ``limit`` passed. The message lists the ready replicas and what the others lack.
        """
        with reminding(lambda: notify(f"waiting for {self._wanted(count, names)}")):
            while len(ready := self.ready()) < count or not set(names) <= set(ready):
                news = self._news
                try:
                    async with asyncio.timeout_at(limit.at):
                        await news.wait()
                except TimeoutError:
                    raise DeadlineExceeded(f"waited {limit.seconds:.3g} s for {self._wanted(count, names)}") from None
        return self.ready()

    def _wanted(self, count: int, names: Collection[str]) -> str:
        ready = self.ready()
        others = [_lack(replica) for _, replica in sorted(self._members.replicas.items()) if replica.name not in ready]
        known = [f"ready: {', '.join(ready) or 'none'}", *(line for line in others if line)]
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
