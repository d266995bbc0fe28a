"""Rejoining of ranks whose actors Ray restarted: when the coordinator reports one as missing, it is asked to join again.

Functions that run inside an actor, called through Ray: join the coordinator, publish, leave.

The actor's process remembers here what it joined as. So joining again changes nothing while the process lives, and a process that
Ray restarted has joined nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from weightsync.config import ClientSettings
from weightsync.coordinator.status import Status
from weightsync.engine.engine import Engine
from weightsync.errors import AuthenticationError, MembershipError
from weightsync.protocol.event_loop import shared_loop
from weightsync.protocol.messages import RoundResult
from weightsync.server.watch import Watch
from weightsync.trainer.trainer import Trainer
from weightsync_ray.actor_calls import Access, RankPlace, as_own_error, call

_lock = threading.Lock()
_joined: dict[tuple[str | None, int], tuple[Access, Trainer | Engine]] = {}


def join(worker: Any, access: Access, place: RankPlace, source: Callable[[Any], Any], options: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Make this actor a trainer rank that publishes ``source(worker)``, or an engine rank around that adapter. Idempotent."""
    with _lock:
        key = (place.replica, place.rank)
        before = _joined.get(key)
        if before is not None and before[0] == access:
            return
        if before is not None:  # it belongs to another coordinator, whose manager is gone
            del _joined[key]
            before[1].close()
        at: dict[str, Any] = {"token": access.token, "rank": place.rank, "world_size": place.world_size}
        made = source(worker)
        agent = (
            Trainer(made, access.url, **at, **options)
            if place.replica is None
            else Engine(made, place.replica, access.url, **at, **options)
        )
        _joined[key] = (access, agent)


def is_joined(_worker: Any, place: RankPlace) -> bool:  # noqa: ANN401
    """Return whether this actor's process has joined as that rank. False in a process that Ray restarted."""
    return (place.replica, place.rank) in _joined


def publish(_worker: Any, place: RankPlace, number: int, timeout: float) -> RoundResult | None:  # noqa: ANN401
    """Publish on this rank. Rank 0 returns the result.

    Raises:
        MembershipError: This actor has not joined as that rank.
        WeightSyncError: :meth:`weightsync.Trainer.publish` raised it.
    """
    _, agent = _joined.get((place.replica, place.rank), (None, None))
    if not isinstance(agent, Trainer):
        raise MembershipError(
            f"{place} has not joined in this actor: if Ray restarted it, restore the model and call add_trainer() again"
        )
    result = agent.publish(number, timeout=timeout)
    return result if place.rank == 0 else None


def leave(_worker: Any, place: RankPlace) -> None:  # noqa: ANN401
    """Leave the coordinator. An engine keeps its weights. Idempotent."""
    with _lock, ExitStack() as left:
        _, agent = _joined.pop((place.replica, place.rank), (None, None))
        if agent is not None:
            left.callback(agent.close)


_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_RETRIES = 900
"""How often Ray repeats one call to rejoin: about once a second while an actor is being restarted."""
_CLOSE_SECONDS = 5.0


@dataclass
class ActorGroup:
    """Actors of the trainer (``replica`` is ``None``) or of one replica, in rank order, and how they join."""

    replica: str | None
    actors: tuple[Any, ...]
    source: Callable[[Any], Any]
    options: Mapping[str, Any]
    busy: set[int] = field(default_factory=set)
    """Ranks that have been asked to rejoin and have not answered."""
    given_up: set[int] = field(default_factory=set)
    """Ranks whose actors will not return, or could not join."""

    @property
    def places(self) -> list[RankPlace]:
        """Rank of each actor."""
        return [RankPlace(self.replica, rank, len(self.actors)) for rank in range(len(self.actors))]

    def join(self, place: RankPlace, access: Access, retries: int = 0) -> Any:  # noqa: ANN401 - Ray's reference
        """Ask one actor to join."""
        return call(self.actors[place.rank], join, access, place, self.source, self.options, retries=retries)

    def missing(self, status: Status) -> list[RankPlace]:
        """Ranks that the coordinator does not list."""
        if self.replica is None:
            connected = {rank.rank for rank in status.trainer}
        else:
            connected = {rank.rank for replica in status.replicas if replica.name == self.replica for rank in replica.ranks}
        return [place for place in self.places if place.rank not in connected]


class Rejoining:
    """Watches the coordinator on the event loop of this process's connections, until :meth:`close`. Thread-safe."""

    def __init__(self, settings: ClientSettings, access: Access) -> None:
        self._settings, self._access = settings, access
        self._groups: dict[str | None, ActorGroup] = {}
        self._lock = threading.RLock()
        self._status: Status | None = None
        self._owned = ExitStack()
        loop = shared_loop.borrow()
        self._owned.callback(shared_loop.give_back, _CLOSE_SECONDS)
        self._owned.callback(asyncio.run_coroutine_threadsafe(self._stay(), loop).cancel)

    def add(self, group: ActorGroup) -> None:
        """Keep this group's ranks joined from now on, instead of an older group of the same name."""
        with self._lock:
            self._groups[group.replica] = group

    def remove(self, replica: str | None) -> ActorGroup | None:
        """Stop watching a group, and return it."""
        with self._lock:
            return self._groups.pop(replica, None)

    def group(self, replica: str | None) -> ActorGroup | None:
        """Return the group of this name."""
        return self._groups.get(replica)

    def trainer_lost(self) -> bool:
        """Return whether a trainer rank was missing in the coordinator's last status."""
        group, status = self._groups.get(None), self._status
        return group is not None and status is not None and bool(group.missing(status))

    def names(self) -> list[str | None]:
        """Names of all groups."""
        return list(self._groups)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._owned.close()

    # The rest runs on the event loop, and actors' answers on a thread of Ray's.

    async def _stay(self) -> None:
        watch = Watch(self._settings, self._apply, lambda _: None)
        try:
            await asyncio.wait([watch.ended])
            watch.ended.result()
        except AuthenticationError as error:
            _log.error("restarted actors will not rejoin: %s", error)
        finally:
            await watch.aclose()

    def _apply(self, status: Status) -> None:
        with self._lock:
            self._status = status
            restarted = [
                (group, place)
                for group in self._groups.values()
                for place in group.missing(status)
                if place.rank not in group.busy | group.given_up
            ]
            # Under the lock: a later remove() asks the actor to leave after this call, and actors keep the order of calls.
            for group, place in restarted if ray.is_initialized() else ():
                group.busy.add(place.rank)
                future: Future[None] = group.join(place, self._access, _RETRIES).future()
                future.add_done_callback(partial(self._answered, group, place))

    def _answered(self, group: ActorGroup, place: RankPlace, done: Future[None]) -> None:
        error = done.exception(0)
        with self._lock:
            group.busy.discard(place.rank)
            if error is not None:
                group.given_up.add(place.rank)
        if error is None:
            _log.info("%s has rejoined", place)
        else:
            _log.warning("%s did not rejoin: %s", place, as_own_error(place, error))
