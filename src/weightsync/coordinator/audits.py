"""Replicas that serve are read again: a difference from what they installed takes them out of service."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from weightsync.config import RoundSettings
from weightsync.coordinator.events import Audited, Event
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, on_all
from weightsync.coordinator.ranks import EngineRank
from weightsync.coordinator.replicas import Replica
from weightsync.errors import VerificationError, WeightSyncError, readable
from weightsync.model import Version
from weightsync.protocol.messages import Audit, Done

_log = logging.getLogger(__name__)
_BETWEEN_ANSWERS = 0.01  # seconds, of all ranks together: a round must not meet thousands
_MOST_DOUBLINGS = 6  # of the wait, by looks that failed one after the other


class Audits:
    """Lets the ranks of each replica compare their parameters with what they installed, again and again while no round updates it.

    A look takes at most the settings' share of the time, over all rounds and connections of the replica. ``exclude`` takes a
    replica out of service, ``spawn`` starts a task that the coordinator keeps.
    """

    least_seconds = 10.0
    """From one look to the next, however quick it is. It is longer where there are thousands of ranks."""

    def __init__(
        self,
        settings: RoundSettings,
        exclude: Callable[[Replica, str], None],
        emit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._settings, self._exclude, self._emit, self._spawn = settings, exclude, emit, spawn
        self._tasks = set[asyncio.Task[Any]]()
        self.stagger: Callable[[], float] = random.random
        """Part of the least interval after which a replica is looked at first, so that not all of a fleet are at once."""

    def start(self, replicas: Iterable[Replica], first: bool = True) -> None:
        """Look at those of ``replicas`` that serve, from now on; one in which a difference was found goes out of service first."""
        for replica in replicas:
            looks = replica.looks
            if looks.holds:
                continue
            if replica.refuted and replica.serves:
                self.exclude(replica)
            wanted = self._settings.audit_share and replica.serves and replica.verified != "received" and not replica.restless
            if wanted and looks.task is None:
                looks.task = task = self._spawn(self._audit(replica, first))
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, replica))

    @contextmanager
    def held(self, replicas: Sequence[Replica]) -> Iterator[None]:
        """Look at none of ``replicas`` in the block. A look that runs ends soon, and calls to the same ranks need not wait."""
        for replica in replicas:
            looks = replica.looks
            looks.holds += 1
            task, looks.task = looks.task, None
            if task is not None:
                task.cancel()
        try:
            yield
        finally:
            for replica in replicas:
                replica.looks.holds -= 1
                replica.looks.failures = 0
            self.start(replicas)

    def refuted(self, replica: Replica, link: RankHandle[EngineRank], version: Version, why: str) -> None:
        """A rank found other bytes in its parameters than it installed of ``version``.

        Its replica leaves service now; in a round, after it, unless the round has updated the replica by then.
        """
        if link.serving == version:  # it was not updated since, and this is the first report
            link.serving, link.refuted = None, why
            if replica.looks.alarm(version, why):
                replica.looks.restless = version
                why += ". It is the same as before this version was installed again, so it is not looked at until the next one"
            self._alarm(replica, why)
            self.start((replica,))

    def exclude(self, replica: Replica) -> None:
        """Take a complete replica out of service in which a difference was found."""
        for link in replica.links.values():
            if link.refuted == link.rank.hello.refuted != "" and link.refuted not in replica.looks.alarms:
                self._alarm(replica, link.refuted)  # the rank's report was lost with its connection
        self._exclude(replica, replica.refuted)

    def _alarm(self, replica: Replica, why: str) -> None:
        _log.error("replica %s is taken out of service: %s", replica.name, why)
        self._emit(Audited(replica.name, replica.looks.running, why))

    def _ended(self, replica: Replica, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if replica.looks.task is task:
            replica.looks.task = None
            if not task.cancelled() and task.exception() is None:
                self.start((replica,), first=False)

    async def _audit(self, replica: Replica, first: bool) -> None:
        """Wait until the replica may be looked at, and do so once."""
        looks, now = replica.looks, asyncio.get_running_loop().time()
        least = max(self.least_seconds, _BETWEEN_ANSWERS * len(self._tasks) * replica.world_size)
        least *= 1 << min(looks.failures, _MOST_DOUBLINGS)
        due = looks.ended + max(least, looks.seconds / self._settings.audit_share)
        await asyncio.sleep(max(due - now, least * self.stagger() if first else 0.0))
        for busy in (replica.quarantining, replica.preparing):
            if busy is not None:
                await asyncio.wait([busy], timeout=self._settings.timeout)
        if (version := replica.version) is None or not replica.serves:
            return
        before = looks.seconds
        with looks.measured():
            looks.failures += 1
            answers = await asyncio.gather(*(self._ask(replica, link, version) for link in replica.members().values()))
        if all(answers):
            looks.failures = 0
            self._emit(Audited(replica.name, looks.seconds))
        else:
            looks.seconds = before  # one that hung until its deadline says nothing of what the next one costs

    async def _ask(self, replica: Replica, link: RankHandle[EngineRank], version: Version) -> bool:
        """Whether a rank holds what it installed. Whatever keeps it from looking says nothing against it."""
        try:
            await on_all("audit", RoundDeadline(self._settings.timeout), {link.member: link}, Audit(version), Done)
        except VerificationError as error:
            self.refuted(replica, link, version, str(error))
        except WeightSyncError as error:
            _log.debug("%s was not read again: %s", link.member, readable(str(error)))
        else:
            return True
        return False
