"""Ranks that exchange what they hold while they serve: each round asks for their layouts, and plans for those."""

from __future__ import annotations

from tests.unit.coordinator.contents import MANIFEST, rows_layout
from tests.unit.coordinator.fakes import EngineProcess, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings


def world_of(moves: bool) -> tuple[World, list[EngineProcess]]:
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_trainers(2)
    world.add_replica("r", 2)
    ranks = world.replica("r")
    for rank in ranks:
        rank.moves = moves
        rank.disconnect()
        rank.connect()
    return world, ranks


def exchange(ranks: list[EngineProcess]) -> None:
    first, second = ranks
    first.own, second.own = second.own, first.own


@virtual
async def test_a_round_follows_what_ranks_have_exchanged_since_the_last_one() -> None:
    world, ranks = world_of(moves=True)
    for number in range(1, 5):
        assert (await world.publish(number)).ok
        world.check()
        assert [rank.was_held for rank in ranks] == [number, number]
        if number != 3:  # a round in which none has changed needs no other plan
            exchange(ranks)
    assert ranks[0].own is not None
    assert ranks[0].own.digest == rows_layout(MANIFEST, 1, 2).digest, "exchanged three times"


@virtual
async def test_ranks_that_joined_in_the_middle_of_an_exchange_do_not_agree_before_a_round_and_then_do() -> None:
    """As ranks of data parallelism, which join one after the other."""
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_trainers(2)
    world.add_replica("r", 2)
    ranks = world.replica("r")
    for rank in ranks:
        rank.moves = True
        rank.disconnect()
        rank.connect()
        if rank is ranks[0]:
            exchange(ranks)
    await world.drain(1)
    assert not any(rank.was_held for rank in ranks), "what is prepared ahead of a round is not held"
    assert (await world.publish(1)).ok
    world.check()
