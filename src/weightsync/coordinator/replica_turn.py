"""Turns of publications of adapters at one replica, which stages one version at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from weightsync.coordinator.rank_handle import RoundDeadline, bounded
from weightsync.errors import DeadlineExceeded

T = TypeVar("T")


class ReplicaTurn:
    """The right to use a replica's staging memory. Tenants get it one after the other, however many publications each has.

    A publication that takes long keeps it only while no other one waits: a tenant whose process stands still delays no other.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._wanted = asyncio.Event()

    @asynccontextmanager
    async def taken(self, tenant: str, deadline: RoundDeadline) -> AsyncIterator[None]:
        """Run the block in the turn. Raises :class:`~weightsync.errors.DeadlineExceeded` if it does not come in time."""
        if self._taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(mine)
            self._wanted.set()
            try:
                await bounded("another adapter's turn", deadline, mine)
            except BaseException:
                came = mine.done() and not mine.cancelled()  # in the moment in which the wait ended
                mine.cancel()
                self._look()
                if came:
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)  # behind the others
            self._pass_on()

    async def until_wanted(self, work: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for ``work``; after so many seconds only while no other publication waits. Returns whether it is done."""
        await asyncio.wait([work], timeout=seconds)
        if not work.done():
            wanted: asyncio.Future[Any] = asyncio.ensure_future(self._wanted.wait())
            try:
                await asyncio.wait([work, wanted], return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
        return work.done()

    async def bounded(self, what: str, seconds: float, work: Awaitable[T]) -> T:
        """Return the result of ``work``, which is cancelled as soon as it has taken so many seconds and another one waits.

        Raises:
            DeadlineExceeded: It was.
        """
        task = asyncio.ensure_future(work)
        try:
            if not await self.until_wanted(task, seconds):
                raise DeadlineExceeded(f"{what} did not finish within {seconds:.3g} s, and other adapters wait for the replica")
            return await task
        finally:
            task.cancel()

    def _pass_on(self) -> None:
        """Give the turn to the next tenant."""
        self._taken = False
        while self._waiting and not self._taken:
            tenant, waiting = next(iter(self._waiting.items()))
            first = waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
            if not first.done():
                first.set_result(None)
                self._taken = True
        self._look()

    def _look(self) -> None:
        if all(ended.done() for waiting in self._waiting.values() for ended in waiting):
            self._wanted.clear()
