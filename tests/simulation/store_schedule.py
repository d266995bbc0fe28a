"""A schedule with a store: the trainer leaves, and who comes then must join from what it stored."""

from __future__ import annotations

import asyncio
import random

from tests.faults.points import STORE_POINTS
from tests.simulation.acts import happen
from tests.simulation.faults import Fault, Pending
from tests.simulation.object_store import RUN, STORE_FAULTS, STORE_URL
from tests.simulation.schedule import Schedule
from tests.simulation.store_world import _KEY, StoreWorld
from tests.simulation.threads import Thread
from tests.simulation.weights import MANIFEST, version_bytes

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.store.catalog import newest
from weightsync.store.objects import ObjectStore
from weightsync.store.restore import tensors_of

__all__ = ["StoreSchedule"]

_KINDS = ("slow", "hang", "crash", "crash", "disconnect", "coordinator crash")
_STORING_SECONDS = 10.0


class StoreSchedule(Schedule):
    """See the module."""

    world: StoreWorld
    later: tuple[str, ...] = STORE_POINTS

    def __init__(self, world: StoreWorld, seed: int) -> None:
        super().__init__(world, seed)
        self.gathering = self.misfit = False
        self.storing = random.Random(f"storing {seed}")

    def beside(self, engines: dict[str, str]) -> None:
        draw, world = self.storing, self.world
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            at = draw.choice((0.0, draw.uniform(0.0, 0.2), draw.uniform(0.0, 5.0)))
            world.loop.call_later(at, world.bucket.strike, draw.choice(STORE_FAULTS), draw.uniform(0.5, 25.0))
        if draw.random() < 0.5:
            member, point = f"trainer/{draw.randrange(world.trainer_shape[0])}", draw.choice(STORE_POINTS)
            world.pending[member, point] = Pending(member, point, draw.choice(_KINDS), draw.uniform(0.05, 30.0))

    async def act(self) -> None:
        self.world.come_back()
        await asyncio.sleep(self.storing.choice((0.1, 1.0)))
        for _ in range(self.storing.choice((1, 2, 2, 3))):  # so that there are chains
            await super().act()
        if self.storing.random() < 0.6:
            await self._without_trainer()

    async def _without_trainer(self) -> None:
        """Somebody comes while the trainer is away, and the store has its faults."""
        draw, world = self.storing, self.world
        await asyncio.sleep(draw.choice((0.0, draw.uniform(0.0, 0.1), _STORING_SECONDS)))
        world.leave(draw.random() < 0.7)
        for name in draw.sample(("engine crash", "replica joins", "coordinator crash", *STORE_FAULTS), 3):
            at, seconds = draw.choice((0.0, draw.uniform(0.0, 2.0), draw.uniform(0.0, 30.0))), draw.uniform(0.5, 25.0)
            if name in STORE_FAULTS:
                world.loop.call_later(at, world.bucket.strike, name, seconds)
            else:
                world.loop.call_later(at, happen, world, Fault(name, at, draw.choice(list(world.engines)), seconds))
        await asyncio.sleep(draw.uniform(10.0, 80.0))

    async def calm(self) -> None:
        """Faults stop. If the trainer is away then, a replica that starts must join from the store."""
        draw, world = self.storing, self.world
        away = draw.random() < 0.7
        if draw.random() < 0.35:
            away = True
            await self._last_words()
        world.calm = True
        if away:
            await asyncio.sleep(_STORING_SECONDS)
            world.leave(True)
            name = draw.choice(list(world.shape))
            for engine in list(world.engines.values()):
                if engine.name == name and engine.alive:
                    engine.crash()
                    world.trouble(engine, 0.0)
                    world.restart_later(engine)
        await super().calm()
        if away:
            self._check_joined()
        world.come_back()
        await asyncio.sleep(_STORING_SECONDS)

    async def _last_words(self) -> None:
        """The trainer dies while it stores, and does not come back."""
        world, point = self.world, self.storing.choice(STORE_POINTS[:-1])
        world.come_back()
        await asyncio.sleep(1.0)
        world.away = True
        world.pending["trainer/0", point] = Pending("trainer/0", point, "crash", 0.0)
        await self.publish(25.0, False, set())
        await asyncio.sleep(self.storing.choice((1.0, _STORING_SECONDS)))
        world.leave(False)

    def _check_joined(self) -> None:
        """Every replica serves something, if there is anything to read."""
        world = self.world
        if world.coordinator is None:
            return
        coordinator = world.coordinator.coordinator
        stored = coordinator.stored.newest
        if stored is None or not world.bucket.intact(stored.stored):
            return
        world.seen["joined while the trainer was away for good"] += 1
        for replica in coordinator.status().replicas:
            if not replica.routable and len(coordinator._keyed._kept) < 2 and "keyed digests" in str(replica.error):
                world.seen["waits for the next publication, as no keyed digest is left for it"] += 1  # docs/architecture.md
            elif not replica.routable:
                world.violated("stuck", f"version {stored.version} is in the store, and {replica} did not join")

    async def end(self) -> None:
        await asyncio.sleep(_STORING_SECONDS)
        Thread(self._read_last, "reading the last version", owner=self.world.coordinator).start()
        await asyncio.sleep(_STORING_SECONDS)
        await super().end()

    def _read_last(self) -> None:
        """The last version is in the store, with its bytes."""
        world, store, stored = self.world, ObjectStore(STORE_URL), None
        try:
            stored = newest(store, RUN, _KEY.public)
            if stored is None or stored.version.number != world.label_of(self.number):
                world.violated("stuck", f"the store has {stored and stored.version}, and the last version is {self.number}")
                return
            parts = tensors_of(store, stored, Deadline(_STORING_SECONDS))
            read = {spec.name: data.tobytes() for part in parts for spec, data in part}
        except WeightSyncError as error:
            if stored is None or world.bucket.intact(stored.stored):  # a trainer does not read what it extends
                world.violated("stuck", f"the last version cannot be read from the store: {error!r}")
            return
        values = version_bytes(self.number, world.salt)
        if read != {spec.name: content.tobytes() for spec, content in zip(MANIFEST, values, strict=True)}:
            world.violated("mislabelled", f"version {self.number} in the store has other bytes")
