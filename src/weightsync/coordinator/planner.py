"""Where agreements are made and kept: in threads, few at a time, in bounded memory; a plan that nobody waits for is stopped."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TypeVar

from weightsync.coordinator.negotiation import Agreement, Claim, agree_on, cover_trainers, key_of
from weightsync.coordinator.rank_handle import Limit, bounded
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.errors import ConfigurationError
from weightsync.model import Manifest
from weightsync.planning.coverage import Cover
from weightsync.planning.limits import Stop

__all__ = ["Planner", "Room"]

T = TypeVar("T")

_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_AT_ONCE = 2
"""Plans are made by one interpreter: more threads would not make them faster, and asyncio's are needed for Hellos, too."""


class Room:
    """Memory for plans, shared by all that are made and kept. Thread-safe."""

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes or _memory() // 2
        self.taken = 0
        self._lock = threading.RLock()  # a collection inside may drop a plan, which gives its memory back

    def take(self, nbytes: int) -> None:
        """Add to what is taken. Raises :class:`~weightsync.errors.ConfigurationError` if it would be too much."""
        with self._lock:
            if self.taken + nbytes > self.nbytes:
                raise ConfigurationError(
                    f"there is no room for this plan: plans take {self.taken:,} of {self.nbytes:,} bytes of the coordinator's "
                    "memory already; let replicas that are not needed leave, or raise WEIGHTSYNC_PLAN_BYTES at the coordinator"
                )
            self.taken += nbytes

    def give(self, nbytes: int) -> None:
        """Take it from what is taken."""
        with self._lock:
            self.taken -= nbytes


def _memory() -> int:
    """The machine's, or the container's where that has less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CONTAINER.read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


class Planner:
    """Agreements by replica, and the trainer's cover. Used on one event loop."""

    def __init__(self, nbytes: int | None = None) -> None:
        self.agreed: dict[str, Agreement] = {}
        """Of earlier rounds: reused where nothing that they depend on has changed."""
        self.room = Room(nbytes)
        self._covered: dict[str, Cover] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    def forget_all_but(self, replicas: Container[str]) -> None:
        """Drop the agreements of other replicas than these."""
        for name in [name for name in self.agreed if name not in replicas]:
            self.agreed.pop(name).claim.keep(0)

    async def agree(
        self, replica: str, trainers: Mapping[str, TrainerRank], engines: Mapping[str, EngineRank], limit: Limit
    ) -> Agreement:
        """See :func:`~weightsync.coordinator.negotiation.agree_on`. Raises :class:`~weightsync.errors.DeadlineExceeded`, too."""
        earlier = self.agreed.get(replica)
        if earlier is not None and earlier.holds_for(trainers, engines):
            return earlier

        def work(stop: Stop) -> Agreement:
            claim = Claim(self.room.take, self.room.give)
            try:
                return agree_on(replica, trainers, engines, earlier, claim, stop)
            except BaseException:
                claim.keep(0)  # now: the traceback may hold it for long
                raise

        try:
            agreed = await self._run("planning", limit, work, lambda unwanted: unwanted.claim.keep(0))
        except BaseException:
            if earlier is not None and not earlier.claim.nbytes:
                self.agreed.pop(replica, None)  # its memory was given to the plan that failed
            raise
        self.agreed[replica] = agreed
        return agreed

    async def cover(self, manifest: Manifest, trainers: Mapping[str, TrainerRank], limit: Limit) -> Cover:
        """See :func:`~weightsync.coordinator.negotiation.cover_trainers`."""
        key = key_of(trainers, {})
        if key not in self._covered:
            found = await self._run("checking the trainer's layouts", limit, lambda stop: cover_trainers(manifest, trainers, stop))
            self._covered = {key: found}
        return self._covered[key]

    async def _run(
        self, what: str, limit: Limit, work: Callable[[Stop], T], drop: Callable[[T], None] = lambda unwanted: None
    ) -> T:
        """``work`` in a thread, whose place is free when it has really ended; ``drop`` takes what comes when nobody waits now."""
        if self._places.locked():
            await bounded(f"{what}, after other plans", limit, self._places.acquire())
        else:
            await self._places.acquire()
        stop = Stop()
        try:
            limit.remaining(what)
            ending = asyncio.get_running_loop().run_in_executor(None, _whole, work, stop)
        except BaseException:
            self._places.release()
            raise
        ending.add_done_callback(self._ended)
        try:
            return await bounded(what, limit, asyncio.shield(ending))
        except BaseException:
            stop.set()
            ending.add_done_callback(lambda done: None if done.cancelled() or done.exception() else drop(done.result()))
            raise

    def _ended(self, ending: asyncio.Future[T]) -> None:
        self._places.release()
        if not ending.cancelled():
            ending.exception()  # looked at: there may be nobody left to raise it for


def _whole(work: Callable[[Stop], T], stop: Stop) -> T:
    """``work(stop)``, whose every end a future can hold: asyncio waits for ever for one that raised StopIteration."""
    try:
        return work(stop)
    except StopIteration as error:
        raise RuntimeError("an iterator ended inside a plan, which is a bug") from error
