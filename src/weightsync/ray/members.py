"""Functions that run inside an actor, called through Ray: join the coordinator, publish, leave.

The actor's process remembers here what it joined as. So joining again changes nothing while the process lives, and a process that
Ray restarted has joined nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from weightsync.engine.engine import Engine
from weightsync.errors import MembershipError
from weightsync.protocol.messages import RoundResult
from weightsync.ray.places import Access, RankPlace
from weightsync.trainer.trainer import Trainer

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
