"""Puts virtual time, threads and wires under the real modules, for as long as a schedule runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.simulation import threads as simulated
from tests.simulation.network import connector
from tests.simulation.refuted import SourceOracle
from tests.simulation.remembered import REMEMBERED
from tests.simulation.world import World

import weightsync.coordinator.replicas
import weightsync.coordinator.round
import weightsync.deadline
import weightsync.engine.adapter_calls
import weightsync.engine.engine_role
import weightsync.engine.fill.direct
import weightsync.engine.fill.receive_ahead
import weightsync.engine.fill.streamed
import weightsync.engine.fill.windows
import weightsync.engine.lora_role
import weightsync.engine.readers
import weightsync.engine.receiver
import weightsync.engine.served_weights
import weightsync.engine.session
import weightsync.engines.module
import weightsync.outcome
import weightsync.protocol.connection
import weightsync.protocol.dial
import weightsync.protocol.worker
import weightsync.publishing.published_shards
import weightsync.spans
import weightsync.trainer.background
import weightsync.trainer.stream
import weightsync.trainer.trainer
import weightsync.trainer.trainer_role
from weightsync import failpoints
from weightsync.coordinator.replicas import Replica, State
from weightsync.tensors.shards import FollowedShards, ShardedState

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
        Lock=simulated.Lock, Event=simulated.Event, Thread=simulated.Thread, current_thread=threading.current_thread,
        Condition=threading.Condition,  # around a simulated lock; nobody here waits for one
    )  # fmt: skip
    waiting = SimpleNamespace(Lock=simulated.Lock, RLock=simulated.Lock, Condition=simulated.Condition)

    # Shards stay where they are, except where programs move them. Trainers hand them over with the manifest.
    def followed(state: Any, **options: Any) -> Any:
        if world.people and not isinstance(state, tuple):
            return FollowedShards(state, **options)
        known = state.declare() if isinstance(state, ShardedState) else state
        return SimpleNamespace(now=lambda: known, release=lambda: None)

    become, make, sources = Replica.become, Replica.__init__, SourceOracle(world)

    def becoming(replica: Replica, state: State, *rest: Any, **named: Any) -> None:
        become(replica, state, *rest, **named)
        world.seen[f"replica {state}"] += 1
        if state == "loaded":
            sources.loaded(replica)

    def making(replica: Replica, *rest: Any, **named: Any) -> None:
        make(replica, *rest, **named)
        world.seen["replica registered"] += 1

    with replaced(
        (Replica, "become", becoming),
        (Replica, "__init__", making),
        (weightsync.coordinator.round, "_update_from", sources.update),
        *REMEMBERED,
        (failpoints, "_gate", world.reached),
        (weightsync.deadline, "time", clock),
        (weightsync.coordinator.replicas, "time", clock),
        (weightsync.engine.adapter_calls, "time", clock),
        (weightsync.engine.adapter_calls, "threading", locks),
        (weightsync.engine.engine_role, "time", clock),
        (weightsync.engine.served_weights, "time", clock),
        (weightsync.engine.session, "threading", locks),
        (weightsync.engine.lora_role, "threading", locks),
        (weightsync.engine.readers, "time", clock),
        (weightsync.engine.fill.direct, "time", clock),
        (weightsync.engine.fill.streamed, "time", clock),
        (weightsync.engine.fill.receive_ahead, "time", clock),
        (weightsync.engine.fill.receive_ahead, "ThreadPoolExecutor", simulated.Executor),
        (weightsync.engine.fill.windows, "time", clock),
        (weightsync.engine.receiver, "threading", waiting),
        (weightsync.engines.module, "threading", waiting),
        (weightsync.spans, "time", clock),
        (weightsync.trainer.trainer, "Future", simulated.Future),
        (weightsync.outcome, "threading", locks),
        (weightsync.trainer.background, "threading", locks),
        (weightsync.trainer.stream, "threading", waiting),
        (weightsync.trainer.trainer_role, "time", clock),
        (weightsync.trainer.trainer_role, "threading", locks),
        (weightsync.publishing.published_shards, "FollowedShards", followed),
        (
            weightsync.engine.fill.direct,
            "row_groups",
            functools.partial(weightsync.engine.fill.direct.row_groups, group_bytes=_GROUP_BYTES),
        ),
        (weightsync.protocol.worker, "threading", locks),
        (weightsync.protocol.worker, "Future", simulated.Future),
        (weightsync.protocol.worker, "queue", SimpleNamespace(SimpleQueue=simulated.SimpleQueue)),
        (weightsync.protocol.connection, "time", clock),
        (weightsync.protocol.connection, "random", world.random),
        (weightsync.protocol.dial, "connect", connector(world, world.current)),
    ):
        yield
