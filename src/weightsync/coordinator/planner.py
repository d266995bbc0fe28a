"""Cache of transfer plans. Planning runs in a few threads and in bounded memory, and stops when no caller waits for the plan."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TypeVar

from weightsync.closing import OnFailure
from weightsync.coordinator.negotiation import MemoryClaim, TransferPlan, key_of, negotiate, source_coverage
from weightsync.coordinator.rank_handle import RoundDeadline, bounded
from weightsync.coordinator.ranks import EngineRank, PublishingRank
from weightsync.errors import ConfigurationError
from weightsync.model import Manifest
from weightsync.planning.coverage import Coverage
from weightsync.planning.limits import Stop

T = TypeVar("T")

_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_AT_ONCE = 2
"""Threads that plan at the same time. More would not be faster under the GIL, and Hellos need asyncio's threads as well."""


class PlanMemory:
    """Memory budget that all plans share, both those in the making and those that are kept. Thread-safe."""

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes or _memory() // 2
        self.taken = 0
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may drop a plan, which calls give()

    def take(self, nbytes: int) -> None:
        """Reserve ``nbytes``.

        Raises:
            ConfigurationError: The budget does not allow it.
        """
        with self._lock:
            if self.taken + nbytes > self.nbytes:
                raise ConfigurationError(
                    f"the coordinator has no memory left for this plan: other plans take {self.taken:,} of {self.nbytes:,} bytes; "
                    "stop replicas that are not needed, or raise WEIGHTSYNC_PLAN_BYTES at the coordinator"
                )
            self.taken += nbytes

    def give(self, nbytes: int) -> None:
        """Release ``nbytes``."""
        with self._lock:
            self.taken -= nbytes


def _memory() -> int:
    """Bytes of memory of the machine, or of the container if its limit is lower."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CONTAINER.read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


class Planner:
    """Agreements by replica, and the coverages of sources. Not thread-safe: used on one event loop."""

    def __init__(self, nbytes: int | None = None) -> None:
        self.agreed: dict[str, TransferPlan] = {}
        """Agreements of earlier rounds, reused while nothing that they depend on has changed."""
        self.room = PlanMemory(nbytes)
        self._covered: dict[str, tuple[str, Coverage]] = {}
        """Key and coverage of each source, by the replica's name; empty for the trainer."""
        self._places = asyncio.Semaphore(_AT_ONCE)

    def keep_only(self, replicas: Container[str]) -> None:
        """Drop what is known of all replicas except ``replicas``."""
        for name in [name for name in self.agreed if name not in replicas]:
            self.agreed.pop(name).claim.keep(0)
        for name in [name for name in self._covered if name and name not in replicas]:
            del self._covered[name]

    async def agree(
        self, replica: str, sources: Mapping[str, PublishingRank], engines: Mapping[str, EngineRank], deadline: RoundDeadline
    ) -> TransferPlan:
        """Return the agreement for one replica, as :func:`~weightsync.coordinator.negotiation.negotiate` does, in a thread.

        Raises:
            DeadlineExceeded: ``deadline`` passed.
        """
        earlier = self.agreed.get(replica)
        if earlier is not None and earlier.holds_for(sources, engines):
            return earlier

        def work(stop: Stop) -> TransferPlan:
            claim = MemoryClaim(self.room.take, self.room.give)
            with OnFailure(claim.keep, 0):  # release it now: the traceback may keep the claim alive
                return negotiate(replica, sources, engines, earlier, claim, stop)

        try:
            agreed = await self._run("planning", deadline, work, lambda unwanted: unwanted.claim.keep(0))
        except BaseException:
            if earlier is not None and not earlier.claim.nbytes:
                self.agreed.pop(replica, None)  # its memory went to the plan that failed
            raise
        self.agreed[replica] = agreed
        return agreed

    async def cover(
        self, manifest: Manifest, sources: Mapping[str, PublishingRank], deadline: RoundDeadline, name: str = ""
    ) -> Coverage:
        """Return the coverage of the trainer, or of the replica ``name`` as a source.

        See :func:`~weightsync.coordinator.negotiation.source_coverage`.
        """
        key, whose = key_of(sources, {}), f"replica {name}" if name else "the trainer"
        earlier = self._covered.get(name)
        if earlier is not None and earlier[0] == key:
            return earlier[1]
        coverage = await self._run(
            f"checking the layouts of {whose}", deadline, lambda stop: source_coverage(manifest, sources, whose, stop)
        )
        self._covered[name] = key, coverage
        return coverage

    async def _run(
        self, what: str, deadline: RoundDeadline, work: Callable[[Stop], T], drop: Callable[[T], None] = lambda unwanted: None
    ) -> T:
        """Run ``work`` in a thread. Its slot is free once it has really ended; a result that comes too late goes to ``drop``."""
        await bounded(f"{what}, after other plans", deadline, self._places.acquire())
        stop = Stop()
        with OnFailure(self._places.release):
            deadline.remaining(what)
            ending = asyncio.get_running_loop().run_in_executor(None, _whole, work, stop)
        ending.add_done_callback(self._ended)
        try:
            return await bounded(what, deadline, asyncio.shield(ending))
        except BaseException:
            stop.set()
            ending.add_done_callback(lambda done: None if done.cancelled() or done.exception() else drop(done.result()))
            raise

    def _ended(self, ending: asyncio.Future[T]) -> None:
        self._places.release()
        if not ending.cancelled():
            ending.exception()  # mark as retrieved: perhaps no call is left to raise it


def _whole(work: Callable[[Stop], T], stop: Stop) -> T:
    """Run ``work(stop)``, with StopIteration as RuntimeError, because asyncio would wait forever for a future that holds it."""
    try:
        return work(stop)
    except StopIteration as error:
        raise RuntimeError("an iterator ended inside a plan; this is a bug in weightsync") from error
