"""Replicas that serve are read again: a difference from what they installed takes them out of service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from weightsync.config import RoundSettings
from weightsync.coordinator.events import Audited, Event
from weightsync.coordinator.rank_handle import RoundDeadline, on_all
from weightsync.coordinator.replicas import Replica
from weightsync.errors import VerificationError, WeightSyncError, readable
from weightsync.protocol.messages import Audit, Done

_log = logging.getLogger(__name__)
_BETWEEN_ANSWERS = 0.01  # seconds, of all ranks together: a round must not meet thousands


class Audits:
    """Lets the ranks of each replica compare their parameters with what they installed, again and again while no round updates it.

    A look takes at most the settings' share of the time. ``exclude`` takes a replica out of service, ``spawn`` starts a task that
    the coordinator keeps.
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
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._held = set[str]()
        """Replicas that a round is about to update."""

    def start(self, replicas: Iterable[Replica]) -> None:
        """Look at those of ``replicas`` that serve, from now on until :meth:`hold`, or until one of their ranks cannot."""
        for replica in replicas:
            name = replica.name
            if self._settings.audit_share and replica.serves and name not in self._tasks and name not in self._held:
                self._tasks[name] = task = self._spawn(self._audit(replica))
                task.add_done_callback(partial(self._ended, name))

    def hold(self, replicas: Iterable[Replica]) -> None:
        """Do not look at ``replicas`` until :meth:`go_on`. One that runs ends soon, and calls to the same ranks need not wait."""
        for replica in replicas:
            self._held.add(replica.name)
            if (task := self._tasks.pop(replica.name, None)) is not None:
                task.cancel()

    def go_on(self, replicas: Iterable[Replica]) -> None:
        """The round has ended that held ``replicas``."""
        self._held.difference_update(replica.name for replica in replicas)
        self.start(replicas)

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _audit(self, replica: Replica) -> None:
        version, loop, seconds = replica.version, asyncio.get_running_loop(), 0.0
        while version is not None:
            least = max(self.least_seconds, _BETWEEN_ANSWERS * len(self._tasks) * replica.world_size)
            await asyncio.sleep(max(least, seconds / self._settings.audit_share))
            if not replica.serves or replica.version != version:
                return
            started = loop.time()
            try:
                await on_all("audit", RoundDeadline(self._settings.timeout), replica.members(), Audit(version), Done)
            except VerificationError as error:
                self._emit(Audited(replica.name, loop.time() - started, str(error)))
                _log.error("replica %s is taken out of service: %s", replica.name, error)
                if replica.serves:  # another of its ranks may have gone meanwhile
                    self._exclude(replica, str(error))
                return
            except WeightSyncError as error:
                _log.debug("replica %s is not read again: %s", replica.name, readable(str(error)))
                return
            seconds = loop.time() - started
            self._emit(Audited(replica.name, seconds))
