"""Holds that a replica gets no more requests for the drain before its pause, and that routers know it again before the next one."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator.events import ReplicaPhase

DRAIN = 2.0


def fleet(drain: float = DRAIN, max_unavailable: int | None = 1, windows: int = 0) -> World:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, drain=drain, max_unavailable=max_unavailable))
    world.windows = windows
    world.add_trainers(2)
    for name in ("one", "two"):
        world.add_replica(name)
    return world


def routable(world: World) -> set[str]:
    return {replica.name for replica in world.coordinator.status().replicas if replica.routable}


@virtual
async def test_a_replica_serves_on_during_its_drain_and_then_pauses() -> None:
    world = fleet(max_unavailable=None)
    first = await world.publish(1)
    assert all("drain" not in replica.phases for replica in first.replicas)  # nobody sends requests to a replica without a version
    assert routable(world) == {"one", "two"}
    asking = asyncio.ensure_future(world.publish(2))
    await asyncio.sleep(DRAIN)
    assert routable(world) == set()
    assert all(process.generating and process.holds(1) for process in world.engines.values())
    result = await asking
    assert [list(replica.phases)[:3] for replica in result.replicas] == [["agree", "drain", "pause"]] * 2
    assert all(replica.phases["drain"] == DRAIN for replica in result.replicas)
    assert all(replica.paused_seconds < DRAIN for replica in result.replicas)
    assert routable(world) == {"one", "two"}
    await world.coordinator.aclose()


@virtual
async def test_replicas_of_a_stream_drain_too() -> None:
    world = fleet(max_unavailable=None, windows=3)
    await world.publish(1)
    result = await world.publish(2)
    assert result.ok
    assert all(replica.phases["drain"] == DRAIN for replica in result.replicas)
    await world.coordinator.aclose()


@virtual
async def test_one_replica_is_always_routable_in_a_rolling_update() -> None:
    world = fleet()
    known: set[str] = set()  # what a router knows that needs a second for each change

    async def announced() -> None:
        await asyncio.sleep(1.0)
        known.clear()
        known.update(routable(world))

    world.coordinator.announced = announced
    await world.publish(1)
    known |= routable(world)
    emptied = []

    async def withdraw() -> None:
        async for event in world.coordinator.subscribe():
            if isinstance(event, ReplicaPhase) and event.phase == "drain":
                known.discard(event.replica)
                emptied.append(not known)

    watching = asyncio.ensure_future(withdraw())
    await asyncio.sleep(0)
    assert (await world.publish(2)).ok
    assert emptied == [False, False]
    watching.cancel()
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("how", ["lost", "late", "cancelled"])
async def test_a_replica_whose_update_ends_in_its_drain_is_routable_again_or_lost(how: str) -> None:
    world = fleet(drain=100.0, max_unavailable=None)
    await world.publish(1)
    asking = asyncio.ensure_future(world.publish(2, timeout=50.0 if how == "late" else 500.0))
    await asyncio.sleep(5.0)
    if how == "lost":
        world.engines["one/0"].disconnect()
        await asking
        assert routable(world) == {"two"}
    elif how == "late":
        await asyncio.gather(asking, return_exceptions=True)
        assert routable(world) == {"one", "two"}  # not paused: they serve the version before
        assert world.states() == {"one": ("loaded", 1), "two": ("loaded", 1)}
    else:
        await world.coordinator.aclose()
        assert all(not replica.draining for replica in world.coordinator._members.replicas.values())
        asking.cancel()
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_routes_name_who_may_get_requests() -> None:
    world = fleet()
    assert world.coordinator.routes() == {}
    for replica in world.coordinator._members.replicas.values():
        replica.url = f"http://{replica.name}:8000"
    assert world.coordinator.routes() == {"http://one:8000": ("one", None), "http://two:8000": ("two", None)}
    result = await world.publish(1)
    world.engines["one/0"].disconnect()
    assert world.coordinator.routes() == {"http://one:8000": ("one", None), "http://two:8000": ("two", result.version)}
    for replica in world.coordinator._members.replicas.values():
        replica.url = "http://same:8000"  # one was started again under another name
    assert world.coordinator.routes() == {"http://same:8000": ("two", result.version)}
    await world.coordinator.aclose()
