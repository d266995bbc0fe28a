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


class Audits:
    """Lets the ranks of each replica compare their parameters with what they installed, again and again while no round updates it.

    A look takes at most the settings' share of the time. ``exclude`` takes a replica out of service, ``spawn`` starts a task that
    the coordinator keeps.
    """

    least_seconds = 10.0
    """From one look to the next, however quick it is."""

    def __init__(
        self,
        settings: RoundSettings,
        exclude: Callable[[Replica, str], None],
        emit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._settings, self._exclude, self._emit, self._spawn = settings, exclude, emit, spawn
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def start(self, replicas: Iterable[Replica]) -> None:
        """Look at those of ``replicas`` that serve, from now on until :meth:`stop`, or until one of their ranks cannot."""
        for replica in replicas:
            if self._settings.audit_share and replica.serves and replica.name not in self._tasks:
                self._tasks[replica.name] = task = self._spawn(self._audit(replica))
                task.add_done_callback(partial(self._ended, replica.name))

    def stop(self, replicas: Iterable[Replica]) -> None:
        """Do not look at ``replicas`` any more. A look that runs ends soon; calls to the same ranks need not wait for that."""
        for replica in replicas:
            if (task := self._tasks.pop(replica.name, None)) is not None:
                task.cancel()

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _audit(self, replica: Replica) -> None:
        version, loop, seconds = replica.version, asyncio.get_running_loop(), 0.0
        while version is not None:
            await asyncio.sleep(max(self.least_seconds, seconds / self._settings.audit_share))
            if not replica.serves or replica.version != version:
                return
            started = loop.time()
            try:
                await on_all("audit", RoundDeadline(self._settings.timeout), replica.members(), Audit(version), Done)
            except VerificationError as error:
                self._emit(Audited(replica.name, loop.time() - started, str(error)))
                _log.error("replica %s is taken out of service: %s", replica.name, error)
                self._exclude(replica, str(error))
                return
            except WeightSyncError as error:
                _log.debug("replica %s is not read again: %s", replica.name, readable(str(error)))
                return
            seconds = loop.time() - started
            self._emit(Audited(replica.name, seconds))
