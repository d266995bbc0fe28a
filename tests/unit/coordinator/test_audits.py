"""Replicas that serve are read again, within their share of the time; a difference takes them out of service, and heals them."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.unit.coordinator.fakes import GRACE, World
from tests.unit.coordinator.test_coordinator import restart
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator.audits import Audits
from weightsync.coordinator.events import Audited

LEAST = 10.0
MOMENT = 0.01  # that each call takes


def fleet(ranks: int = 1, share: float = 0.01) -> World:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, audit_share=share))
    world.add_trainers(1)
    for name in ("one", "two"):
        world.add_replica(name, ranks)
    return world


def looks(world: World, member: str) -> list[float]:
    """When a rank was asked to look at what it serves."""
    return [at for at, who, _ in world.looks if who == member]


def apart(world: World, member: str) -> list[float]:
    times = looks(world, member)
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]


@virtual
async def test_every_rank_of_a_replica_that_serves_is_asked_again_and_again() -> None:
    world = fleet(ranks=2)
    await asyncio.sleep(100.0)
    assert not world.looks, "nobody serves anything"
    await world.publish(1)
    heard = world.coordinator.subscribe()
    await asyncio.sleep(10 * (LEAST + MOMENT))
    for member in world.engines:
        assert len(looks(world, member)) >= 9
        assert set(apart(world, member)) == {LEAST + MOMENT}
    await world.coordinator.aclose()
    audits = [event async for event in heard if isinstance(event, Audited)]
    assert {(event.replica, round(event.seconds, 3), event.error) for event in audits} == {
        ("one", MOMENT, None),
        ("two", MOMENT, None),
    }


@virtual
async def test_a_long_look_is_rare() -> None:
    world = fleet(share=0.02)
    world.delays["one/0", "audit"] = 3.0
    await world.publish(1)
    await asyncio.sleep(1000.0)
    assert set(apart(world, "one/0")) == {3.0 / 0.02 + 3.0}, "the slow one"
    assert set(apart(world, "two/0")) == {LEAST + MOMENT}
    await world.coordinator.aclose()


@virtual
async def test_a_share_of_nothing_turns_it_off() -> None:
    world = fleet(share=0.0)
    await world.publish(1)
    await asyncio.sleep(1000.0)
    assert not looks(world, "one/0")
    await world.coordinator.aclose()


@virtual
async def test_a_replica_whose_weights_were_changed_leaves_service_and_gets_them_again() -> None:
    world = fleet(ranks=2)
    await world.publish(1)
    heard = world.coordinator.subscribe()
    world.faults["one/1", "audit"] = "differ"
    await asyncio.sleep(LEAST + 2 * MOMENT)
    status = {replica.name: replica for replica in world.coordinator.status().replicas}
    assert (status["one"].state, status["two"].state) == ("dirty", "loaded")
    assert "parameters of one/1 were changed since it installed" in (status["one"].error or "")
    await asyncio.sleep(5.0)
    assert world.states() == {"one": ("loaded", 1), "two": ("loaded", 1)}, "re-seeded"
    world.check()
    await asyncio.sleep(3 * LEAST)
    assert len(looks(world, "one/0")) >= 3, "and it is looked at again"
    await world.coordinator.aclose()
    [failed] = [event async for event in heard if isinstance(event, Audited) and event.error]
    assert (failed.replica, failed.error) == ("one", status["one"].error)


@virtual
async def test_a_round_does_not_wait_for_a_look() -> None:
    world = fleet()
    await world.publish(1)
    world.delays["one/0", "audit"] = 50.0
    await asyncio.sleep(LEAST + 1.0)
    before = asyncio.get_running_loop().time()
    result = await world.publish(2)
    assert result.ok
    assert asyncio.get_running_loop().time() - before < 1.0
    world.delays.clear()
    await asyncio.sleep(2 * LEAST)
    assert looks(world, "one/0"), "the version after it is looked at"
    world.check()
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("fault", ["fail", "lost", "crash"])
async def test_a_look_that_fails_says_nothing_against_the_replica(fault: str) -> None:
    world = fleet()
    await world.publish(1)
    world.faults["one/0", "audit"] = fault
    await asyncio.sleep(LEAST + 1.0)
    assert world.states()["one"] == (("lost", None) if fault == "lost" else ("loaded", 1))
    await asyncio.sleep(10 * LEAST)
    assert not looks(world, "one/0"), "not before the next round, or until it reconnects"
    if fault == "lost":
        world.add_replica("one")
    await world.publish(2)
    await asyncio.sleep(3 * LEAST)
    assert len(looks(world, "one/0")) >= 2
    await world.coordinator.aclose()


@virtual
async def test_a_replica_of_which_a_rank_leaves_while_another_finds_a_difference_is_lost() -> None:
    world = fleet(ranks=2)
    await world.publish(1)
    world.faults |= {("one/0", "audit"): "differ", ("one/1", "audit"): "lost"}
    await asyncio.sleep(LEAST + 1.0)
    assert world.states()["one"] == ("lost", None)
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_replica_that_a_restarted_coordinator_finds_serving_is_looked_at() -> None:
    world = fleet()
    await world.publish(1)
    restart(world)
    await asyncio.sleep(3 * LEAST)
    assert len(looks(world, "two/0")) >= 2
    await world.coordinator.aclose()


@virtual
async def test_nothing_of_it_is_left_when_replicas_left() -> None:
    world = fleet()
    await world.publish(1)
    for process in list(world.engines.values()):
        process.disconnect()
    await asyncio.sleep(2 * LEAST)
    audits: Audits = world.coordinator._audits
    assert not audits._tasks
    await world.coordinator.aclose()


@virtual
async def test_a_thousand_ranks_answer_one_in_ten_milliseconds() -> None:
    world = fleet(ranks=4)
    for number in range(300):
        world.add_replica(f"r{number}", 4)
    await world.publish(1)
    await asyncio.sleep(60.0)
    assert all(12.0 < seconds < 13.0 for seconds in apart(world, "r7/3"))
    assert looks(world, "r7/3")
    await world.coordinator.aclose()


@virtual
async def test_a_replica_that_waits_for_its_turn_in_a_round_is_not_looked_at() -> None:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, max_unavailable=1))
    world.add_trainers(1)
    for name in ("one", "two"):
        world.add_replica(name)
    await world.publish(1)
    world.delays["one/0", "move"] = world.delays["two/0", "move"] = 60.0
    world.looks.clear()
    asking = asyncio.ensure_future(world.publish(2, timeout=500.0))
    await asyncio.sleep(30.0)
    world.trainers["trainer/0"].disconnect()
    world.add_trainers(1)  # which confirms what replicas report
    await asyncio.sleep(25.0)
    assert not world.looks
    asking.cancel()
    await world.coordinator.aclose()
