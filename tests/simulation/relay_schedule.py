"""A schedule with a relay: the trainer, its coordinator, the store, the relay and the region fail, each by itself and together."""

from __future__ import annotations

import asyncio
import random

from tests.faults.points import RELAY_POINTS
from tests.simulation.acts import happen
from tests.simulation.faults import Fault, Pending
from tests.simulation.relays import RelayWorld
from tests.simulation.schedule import LAST_SECONDS
from tests.simulation.store_schedule import StoreSchedule

from weightsync.protocol.messages import RoundResult

__all__ = ["RELAY_FAULTS", "RelaySchedule", "with_relays"]

_SHARE = 0.25
_KINDS = ("slow", "hang", "crash", "crash", "disconnect", "coordinator crash")
_CRASH, _HOME_CRASH, _SECOND, _ALL_CRASH = "relay crash", "home coordinator crash", "second relay", "relay and coordinator crash"
RELAY_FAULTS = (_CRASH, _HOME_CRASH, _SECOND, _ALL_CRASH)
_TO_RELAY = ("connection reset", "connection lost without a word", "partition", "stall", "slow wire")
_LOOKING_SECONDS = 120.0
"""Longest time until a relay looks again, reads, and publishes, when nothing goes wrong any more."""


def with_relays(seed: int) -> bool:
    """Whether replicas of the schedule of this seed read from a relay."""
    return random.Random(f"relays {seed}").random() < _SHARE


class RelaySchedule(StoreSchedule):
    """See the module."""

    world: RelayWorld
    later = (*StoreSchedule.later, *RELAY_POINTS, "place")

    def cast(self) -> None:
        world = self.world
        world.start_home()
        super().cast()
        world.start_relay(0)

    def beside(self, engines: dict[str, str]) -> None:
        super().beside(engines)
        draw, world = self.storing, self.world
        if draw.random() < 0.6:
            point = draw.choice((*RELAY_POINTS, "place", "trainer.received.place"))
            world.pending["relay/0", point] = Pending("relay/0", point, draw.choice(_KINDS), draw.uniform(0.05, 30.0))
        for _ in range(draw.choice((0, 0, 1, 2))):
            at = draw.choice((0.0, draw.uniform(0.0, 3.0), draw.uniform(0.0, 20.0)))
            world.loop.call_later(at, self._strike, draw.choice((*RELAY_FAULTS, *_TO_RELAY)), draw.uniform(0.5, 25.0))

    def _strike(self, name: str, seconds: float) -> None:
        world = self.world
        if world.calm:
            return
        if name == _HOME_CRASH:
            if world.home is not None:
                world.hit(name, world.home)
                world.crash(world.home)
        elif name == _SECOND:
            if "relay/1" not in world.publishers:
                world.hit(name)
                world.start_relay(1)
        elif name == _ALL_CRASH:
            world.hit(name)
            for process in (*world.relays(), *([] if world.coordinator is None else [world.coordinator])):
                world.crash(process)
        else:
            happen(world, Fault(name, 0.0, "relay/0", seconds))

    async def act(self) -> None:
        world = self.world
        if world.away and not any(trainer.alive for trainer in world.trainers.values()) and self.storing.random() < 0.4:
            world.begin_epoch(self.number)
        await super().act()

    async def calm(self) -> None:
        self.world.start_home()
        await super().calm()

    def _check_joined(self) -> None:
        self._check_relayed("while the trainer was away for good")

    def _check_relayed(self, when: str) -> None:
        """Every replica serves the newest version of the store, if it can be read."""
        world, newest = self.world, self.world.newest()
        if newest is None or not world.bucket.intact(newest):
            return
        world.seen[f"relayed {when}"] += 1
        self.everybody_has(newest.version.number, world.meaning(newest.version, None))

    async def last(self) -> None:
        world = self.world
        publication = await self.publish(LAST_SECONDS, False, set())
        if len(publication.told) < world.trainer_shape[0]:
            world.violated("stuck", f"of {world.trainer_shape[0]} trainer ranks, {list(publication.told)} published")
        for outcome in publication.told.values():
            if not isinstance(outcome, RoundResult):
                world.violated("stuck", f"the last publication failed: {outcome!r}")
        await asyncio.sleep(_LOOKING_SECONDS)
        self._check_relayed("at the end")

    def _read_last(self) -> None:
        if not self.world.unaware:
            super()._read_last()

    async def end(self) -> None:
        self.world.over = True
        if self.world.home is not None:
            self.world.home.leave()
        await super().end()
