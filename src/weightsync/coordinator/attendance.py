"""Which replicas rounds can take in, and waiting until there are enough of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weightsync.coordinator.membership import Membership
from weightsync.coordinator.rank_handle import Limit
from weightsync.coordinator.replicas import Replica
from weightsync.errors import DeadlineExceeded
from weightsync.protocol.wait_notices import reminding

__all__ = ["Attendance"]


class Attendance:
    """Counts the replicas that are complete and fit the trainer. Told of changes; never asks."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._news = asyncio.Event()

    def changed(self) -> None:
        """Somebody joined or left."""
        self._news.set()
        self._news = asyncio.Event()

    def ready(self) -> tuple[str, ...]:
        """Names of the replicas that a round can take in now."""
        return tuple(sorted(replica.name for replica in self._members.taking_part() if replica.complete))

    async def wait(self, count: int, limit: Limit, notify: Callable[[str], None]) -> tuple[str, ...]:
        """The replicas that are ready, as soon as they are ``count``; ``notify`` is told for whom this waits.

        Raises :class:`~weightsync.errors.DeadlineExceeded` saying who is there and what the others lack.
        """
        with reminding(lambda: notify(f"waiting for {self._wanted(count)}")):
            while len(self.ready()) < count:
                news = self._news
                try:
                    async with asyncio.timeout_at(limit.at):
                        await news.wait()
                except TimeoutError:
                    raise DeadlineExceeded(f"waited {limit.seconds:.3g} s for {self._wanted(count)}") from None
        return self.ready()

    def _wanted(self, count: int) -> str:
        ready = self.ready()
        others = [_lack(replica) for _, replica in sorted(self._members.replicas.items()) if replica.name not in ready]
        known = [f"ready: {', '.join(ready) or 'none'}", *(line for line in others if line)]
        return f"{count} replica{'s' if count != 1 else ''} ({'; '.join(known)})"


def _lack(replica: Replica) -> str:
    if replica.departed:
        return ""
    if not replica.links:
        return f"{replica.name} is lost: {replica.error}"
    if replica.refusal is not None:
        return f"{replica.name} is refused: {replica.refusal}"
    return f"{replica.name} lacks rank {', '.join(map(str, replica.missing))} of {replica.world_size}"
