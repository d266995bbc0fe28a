"""Ranks that exchange what they hold while they serve: each round asks for their layouts, and plans for those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.coordinator import fakes
from tests.unit.coordinator.contents import MANIFEST, rows_layout
from tests.unit.coordinator.fakes import EngineProcess, FakeEngine, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.errors import PlanMismatch
from weightsync.protocol.messages import Body, KeepLayout, LayoutKept, Prepare


class MovingEngine(FakeEngine):
    """Says which layout it keeps, and takes no plan for another one."""

    async def call(self, body: Body, timeout: float) -> Body:
        own = self.process.own
        assert own is not None
        if isinstance(body, KeepLayout):
            await self._enter("hold")
            return LayoutKept(None if own.digest == body.layout else own.to_columns())
        if isinstance(body, Prepare) and body.plan.layout != own.to_columns():
            raise PlanMismatch("this plan is for another layout")
        return await super().call(body, timeout)


def world_of(between: Callable[[list[EngineProcess]], None] = lambda ranks: None) -> tuple[World, list[EngineProcess]]:
    """A trainer, and a replica of two ranks. The second joins after ``between``."""
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_trainers(2)
    world.add_replica("r", 2)
    ranks = world.replica("r")
    for rank in ranks:
        rank.disconnect()
        rank.moves = True
    ranks[0].connect()
    between(ranks)
    ranks[1].connect()
    return world, ranks


def exchange(ranks: list[EngineProcess]) -> None:
    first, second = ranks
    first.own, second.own = second.own, first.own


def holds(world: World) -> int:
    """Answered calls that hold a rank."""
    return sum(phase == "hold" for _, _, phase in world.log)


@pytest.fixture(autouse=True)
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "FakeEngine", MovingEngine)


@virtual
async def test_a_round_follows_what_ranks_have_exchanged_since_the_last_one() -> None:
    world, ranks = world_of()
    for number in range(1, 5):
        assert (await world.publish(number)).ok
        world.check()
        assert holds(world) == 2 * number
        if number != 3:  # a round in which none has changed needs no other plan
            exchange(ranks)
    assert ranks[0].own is not None
    assert ranks[0].own.digest == rows_layout(MANIFEST, 1, 2).digest, "exchanged three times"


@virtual
async def test_ranks_that_joined_in_the_middle_of_an_exchange_agree_in_the_round() -> None:
    """As ranks of data parallelism, which join one after the other. Until then no plan can be made for what they said."""
    world, _ = world_of(between=exchange)
    await world.drain(1)
    assert not holds(world), "what is prepared ahead of a round is not held"
    assert (await world.publish(1)).ok
    world.check()
