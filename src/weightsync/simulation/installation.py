"""Puts virtual time, threads and wires under the real modules, for as long as a schedule runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import weightsync.agents.dial
import weightsync.agents.link
import weightsync.agents.workers
import weightsync.control.replicas
import weightsync.deadline
import weightsync.roles.adapter_calls
import weightsync.roles.engine
import weightsync.roles.filling
import weightsync.roles.route
import weightsync.roles.trainer
from weightsync import points
from weightsync.control.replicas import Replica, State
from weightsync.simulation import threads as simulated
from weightsync.simulation.network import connector
from weightsync.simulation.remembered import REMEMBERED
from weightsync.simulation.world import World
from weightsync.transports import registry

__all__ = ["installed", "replaced"]

_GROUP_BYTES = 48  # so that the few bytes of the simulated model are several groups


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes (object, name, value) inside the block, and put back what was there."""
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            setattr(target, name, value)


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Everything that the real code would ask the machine for comes from ``world``."""
    clock = SimpleNamespace(monotonic=world.monotonic, perf_counter=world.monotonic, time=world.wall)
    locks = SimpleNamespace(
        Lock=simulated.Lock, Event=simulated.Event, Thread=simulated.Thread, current_thread=threading.current_thread
    )
    # Trainers hand over manifest and shards, which stay where they are.
    followed: Callable[..., Any] = lambda state, **_: SimpleNamespace(now=lambda: state)  # noqa: E731
    become, make = Replica.become, Replica.__init__

    def becoming(replica: Replica, state: State, *rest: Any, **named: Any) -> None:  # noqa: ANN401
        become(replica, state, *rest, **named)
        world.seen[f"replica {state}"] += 1

    def making(replica: Replica, *rest: Any) -> None:  # noqa: ANN401
        make(replica, *rest)
        world.seen["replica registered"] += 1

    try:
        with replaced(
            (Replica, "become", becoming),
            (Replica, "__init__", making),
            *REMEMBERED,
            (points, "_gate", world.reached),
            (weightsync.deadline, "time", clock),
            (weightsync.control.replicas, "time", clock),
            (weightsync.roles.adapter_calls, "time", clock),
            (weightsync.roles.adapter_calls, "threading", locks),
            (weightsync.roles.engine, "time", clock),
            (weightsync.roles.engine, "threading", locks),
            (weightsync.roles.filling, "time", clock),
            (weightsync.roles.filling, "ThreadPoolExecutor", simulated.Executor),
            (weightsync.roles.trainer, "time", clock),
            (weightsync.roles.trainer, "threading", locks),
            (weightsync.roles.trainer, "FollowedShards", followed),
            (weightsync.roles.route, "row_groups", functools.partial(weightsync.roles.route.row_groups, group_bytes=_GROUP_BYTES)),
            (weightsync.agents.workers, "threading", locks),
            (weightsync.agents.workers, "queue", SimpleNamespace(SimpleQueue=simulated.SimpleQueue)),
            (weightsync.agents.link, "time", clock),
            (weightsync.agents.link, "random", world.random),
            (weightsync.agents.dial, "connect", connector(world, world.current)),
        ):
            registry.register(world.scheme)
            yield
    finally:
        registry._made.pop(world.scheme.name, None)
