"""A world with a store: trainers that store their versions, replicas that join from it, coordinators that begin with it."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ConcurrentFuture
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
import obstore
from msgspec import structs
from tests.simulation import threads as simulated
from tests.simulation.coordination import CoordinatorProcess
from tests.simulation.installation import replaced
from tests.simulation.object_store import RUN, STORE_URL, SimulatedBucket
from tests.simulation.ranks import _SETTINGS, EngineProcess, Process, TrainerProcess
from tests.simulation.threads import Event, Killed, Thread, threads
from tests.simulation.transfer import CORRUPTIONS
from tests.simulation.weights import MANIFEST, SPARSE, Memory, Sharing
from tests.simulation.world import World

import weightsync.coordinator.stored_versions
import weightsync.deadline
import weightsync.model.stored
import weightsync.transports.store
from weightsync.arrays import UInt64
from weightsync.config import Secret, Timeouts
from weightsync.deadline import Deadline
from weightsync.errors import PeerLost
from weightsync.model import fold
from weightsync.protocol.messages import Offer
from weightsync.protocol.store_messages import StoreAddress
from weightsync.server import store_key
from weightsync.store import catalog, region, writer
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import SigningKey
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.trainer.storing import Storing
from weightsync.transports.base import Transport
from weightsync.transports.store import Store, StoreReader

__all__ = ["STORE_STATES", "StoreWorld", "with_store"]

T = TypeVar("T")

_CHUNK = 8192
_TIMEOUTS = Timeouts(reconnect=2.0, publish=30.0)
_KEY = SigningKey(Secret("A" * 43))

STORE_STATES = (
    "fed by the store while seeding",
    "joined from a key frame",
    "joined from a key frame and deltas",
    "coordinator began with a stored version",
    "trainer away",
)


@functools.lru_cache(maxsize=1024)
def _digest(number: int, salt: int) -> str:
    """Digest of all tensors of a version, from their bytes."""
    memory = Memory(0, 1, "copies")
    memory.fill(number, salt)
    layout, addresses = layout_in_place(MANIFEST, memory.shards)
    digests = np.zeros(len(layout), np.uint64)
    digest_rows(MANIFEST, layout, addresses, 0, len(layout), digests)
    return fold(digests[np.argsort(layout.tensor)])


class _StoredReader(StoreReader):
    """The real reader, to which things happen while it reads, and whose writes are seen."""

    def __init__(self, world: StoreWorld, engine: EngineProcess, *arguments: Any) -> None:
        self.world, self.engine, self.wake = world, engine, Event()
        world.open_sources += 1
        self._counted = True
        super().__init__(*arguments)

    def _pass(self, point: str, deadline: Deadline) -> str | None:
        seconds, kind = self.world.at_point(self.engine, point, fast=0.002)
        self.wake.clear()
        if not self._aborted.done():
            self.wake.wait(min(seconds, deadline.remaining(f"{point} at {self.engine.member}")))
        if kind in ("fail", "lost"):
            raise PeerLost(f"{self.engine.member} was told to fail in {point}")
        return kind

    def begin(self, version: int, deadline: Deadline) -> None:
        self._pass("begin", deadline)
        super().begin(version, deadline)

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        kind = self._pass("read", deadline)
        kind = kind if kind in CORRUPTIONS else None
        self.world.bucket.flipping = self.engine if kind is not None else None
        self.world.seen[f"joined from a key frame{' and deltas' * bool(self._opened._deltas)}"] += 1
        try:
            super().read(group, deadline, digests)
        finally:
            self.engine.written(kind)

    def abort(self) -> None:
        super().abort()
        self.wake.set()

    def close(self) -> None:
        self.world.open_sources -= self._counted
        self._counted = False
        super().close()


class _SimulatedStore(Store):
    def __init__(self, world: StoreWorld) -> None:
        self._world = world

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> StoreReader:
        engine = self._world.current_engine()
        seconds, kind = self._world.at_point(engine, "connect", fast=0.002)
        threads().sleep(min(seconds, deadline.remaining("connecting")))
        if kind in ("fail", "lost"):
            raise PeerLost("the store was told to be gone")
        address = msgspec.json.decode(offer.address, type=StoreAddress)
        return _StoredReader(self._world, engine, address, key)


class _Storing(TrainerProcess):
    """A trainer rank with a store in its settings."""

    world: StoreWorld

    def __init__(self, world: StoreWorld, rank: int, ranks: int, sharing: Sharing) -> None:
        super().__init__(world, rank, ranks, sharing)
        settings = structs.replace(_SETTINGS, store=STORE_URL, store_keep=world.keep, timeouts=_TIMEOUTS)
        self.trainer._storing = Storing(settings, self.role, rank, self.link.call)

    def close(self, timeout: float = 5.0) -> None:
        self.trainer._storing.close()
        super().close(timeout)

    def leave(self) -> None:
        """Leave in good order, for a while."""
        self.trainer._storing.close()  # takes as long as the store does
        self.world.trouble(self, 0.0)
        self.close()
        self.crash()
        if not self.world.away:  # it took so long that it is wanted again
            self.world.restart_later(self)


class StoreWorld(World):
    """See the module. The trainer may be away."""

    in_place = property(lambda world: False, lambda world, value: None)
    """A version that is stored stays in host memory."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = random.Random(f"store {seed}")
        if draw.random() < 0.7:
            self.deltas, self.salt = 1 << 16, self.salt | SPARSE
        self.keep = draw.choice((None, None, 1, 3))
        self.bucket = SimulatedBucket(self, seed)
        self.schemes: list[Transport] = [self.scheme, _SimulatedStore(self)]
        self.names = random.Random(f"names {seed}")
        self.away = False
        """Nobody starts the trainer again."""

    def store_key(self) -> SigningKey:
        return _KEY

    def make_trainer(self, rank: int, ranks: int, sharing: str) -> TrainerProcess:
        return _Storing(self, rank, ranks, sharing)

    def begin(self, coordinator: CoordinatorProcess) -> None:
        """As a server does, before it takes connections."""
        coordinator.spawn(self._adopt(coordinator))

    async def _adopt(self, coordinator: CoordinatorProcess) -> None:
        versions = coordinator.coordinator.stored
        read = functools.partial(store_key.adopt_newest, STORE_URL, RUN, versions)
        versions.read = read if await read() else None
        self.seen["coordinator began with a stored version"] += versions.newest is not None
        self.seen["coordinator began without the store"] += versions.read is not None
        coordinator.ready.set()

    def excuses(self, started: float) -> bool:
        return bool(self.bucket.spoiled) or self.bucket.troubled_until > started

    def leave(self, orderly: bool) -> None:
        """The trainer is gone."""
        self.away = True
        self.seen["trainer away"] += 1
        for trainer in list(self.trainers.values()):
            if trainer.alive and isinstance(trainer, _Storing):
                self.trouble(trainer, 0.0)
                if orderly:
                    Thread(trainer.leave, f"{trainer.member} leaves", owner=trainer).start()
                else:
                    trainer.crash()

    def come_back(self) -> None:
        """The trainer starts again, unless it is leaving still."""
        self.away = False
        for rank in range(self.trainer_shape[0]):
            if not self.trainers[f"trainer/{rank}"].alive:
                self.start_trainer(rank)

    def restart_later(self, dead: Process) -> None:
        if not (self.away and isinstance(dead, TrainerProcess)):
            super().restart_later(dead)

    def _restart(self, dead: Process) -> None:
        if self.away and isinstance(dead, TrainerProcess):
            self.restarting.discard(dead.member)
        else:
            super()._restart(dead)

    def labelled(self, engine: EngineProcess) -> None:
        version = engine.label
        number = None if version is None else self.meaning(version, None)
        if version is not None and number in self.numbers and version.digest != _digest(number, self.salt):
            self.violated("mislabelled", f"{engine} takes the label {version}, whose digest is not that of the version's bytes")
        super().labelled(engine)


class _Daemons:
    """Looks like :class:`weightsync.daemon_threads.DaemonThreads`."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._running, self._closed = most, name, 0, False
        self._jobs: deque[tuple[simulated.Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[[], T]) -> ConcurrentFuture[T]:
        future = simulated.Future[T]()
        if not self._closed:
            self._jobs.append((future, work))
            if self._running < self._most:
                self._running += 1
                Thread(self._work, self._name).start()
        return future

    def _work(self) -> None:
        while self._jobs:
            future, work = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Killed:
                    raise
                except BaseException as error:  # noqa: BLE001 - the caller's to see
                    future.set_exception(error)
        self._running -= 1

    def close(self) -> None:
        self._closed = True
        while self._jobs:
            self._jobs.popleft()[0].cancel()


def _in_thread(work: Callable[[], T], name: str) -> ConcurrentFuture[T]:
    return _Daemons(1, name).submit(work)


def _wait(futures: tuple[ConcurrentFuture[Any], ...], timeout: float, _: str) -> None:
    """Looks like :func:`concurrent.futures.wait` for the first of some futures."""
    if not any(future.done() for future in futures):

        def follow(wake: Callable[[], None]) -> None:
            for future in futures:
                future.add_done_callback(lambda _: wake())

        threads().wait(follow, timeout)


@contextmanager
def with_store(world: StoreWorld) -> Iterator[None]:
    """Let ``world``'s bucket be what the real store's code uses."""
    clock = SimpleNamespace(monotonic=world.monotonic, time=world.wall)
    bucket = world.bucket
    with replaced(
        *((obstore, name, getattr(bucket, name)) for name in ("put", "get_range", "head", "list", "list_with_delimiter", "delete")),
        (ObjectStore, "_store", None),
        (weightsync.deadline, "wait", _wait),
        (weightsync.transports.store, "Future", simulated.Future),
        (weightsync.transports.store, "DaemonThreads", _Daemons),
        (region, "Future", simulated.Future),
        (region, "DaemonThreads", _Daemons),
        (region, "threading", SimpleNamespace(Lock=simulated.Lock)),
        (writer, "threading", SimpleNamespace(Thread=simulated.Thread)),
        (writer, "queue", SimpleNamespace(SimpleQueue=simulated.SimpleQueue)),
        (catalog, "datetime", SimpleNamespace(now=lambda zone: bucket.date(world.wall()))),
        (catalog, "secrets", SimpleNamespace(token_hex=lambda nbytes: world.names.randbytes(nbytes).hex())),
        (weightsync.coordinator.stored_versions, "time", clock),
        (store_key, "in_daemon_thread", _in_thread),
        *((module, "CHUNK_BYTES", _CHUNK) for module in (weightsync.model.stored, region, writer)),
        (region, "_BATCH_BYTES", 2 * _CHUNK),
    ):
        yield
