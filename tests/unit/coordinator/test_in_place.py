"""Memory that trainers let be read in place is gone after the publication: nobody is taken out of service for it."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.fakes import World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.errors import MembershipError, StaleSource

RULES = RoundSettings(run="test", timeout=600.0)


async def late_and_loaded(tells: bool) -> World:
    """Replica ``late`` serves version 1 on, since it never heard of version 2; ``new`` came after it."""
    world = World(RULES, live=True, tells=tells)
    world.add_trainers(2)
    world.add_replica("r", 2)
    world.add_replica("late", 2)
    assert (await world.publish(1)).ok
    for process in world.replica("late"):
        process.disconnect()
    await world.publish(2)
    for process in world.replica("late"):
        process.connect()
    world.add_replica("new")
    await world.drain()
    return world


@pytest.mark.parametrize("tells", [True, False], ids=["coordinator knows", "engines ask"])
@virtual
async def test_a_replica_that_serves_an_older_version_serves_on(tells: bool) -> None:
    world = await late_and_loaded(tells)
    assert world.states() == {"r": ("loaded", 2), "late": ("loaded", 1), "new": ("registered", None)}
    assert all(process.generating for process in world.engines.values())
    assert not [entry for entry in world.log if entry[1].startswith("new") and entry[2] == "pause"]
    world.check()
    assert (await world.publish(3)).ok
    assert set(world.states().values()) == {("loaded", 3)}


@virtual
async def test_a_round_that_is_asked_for_says_why_there_is_none() -> None:
    world = await late_and_loaded(tells=True)
    with pytest.raises(StaleSource, match="can be read only until publish returns"):
        await world.coordinator.seed()
    with pytest.raises(MembershipError):
        await world.coordinator.seed(["nobody"])
    assert world.states()["late"] == ("loaded", 1)
    assert world.coordinator.status().version is None


@virtual
async def test_a_round_that_is_asked_for_takes_nobody_out_whose_source_is_gone() -> None:
    world = await late_and_loaded(tells=False)
    result = await world.coordinator.seed(["late"])
    assert not result.ok
    assert "StaleSource" in str(result.replicas[0].error)
    assert world.states()["late"] == ("loaded", 1)
    world.check()
