"""Preparing ahead of a round: what may go wrong there must cost neither a later round nor a replica that serves."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.test_adapters_in_step import Publisher
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator.planner import PlanMemory, Planner
from weightsync.errors import ConfigurationError, PeerLost
from weightsync.model import Manifest


def world_of(*replicas: str) -> World:
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_trainers(1)
    for name in replicas:
        world.add_replica(name)
    return world


@virtual
async def test_a_trainer_that_leaves_in_the_same_turn_costs_no_place_of_the_planner() -> None:
    world = world_of("a", "b", "c")
    world.trainers["trainer/0"].disconnect()
    await world.drain(1)
    world.trainers.clear()
    world.add_trainers(1)
    assert (await world.publish(1, 5.0)).ok
    world.check()


@virtual
async def test_a_trainer_that_dies_before_its_round_costs_no_place_of_the_planner() -> None:
    world = world_of("a", "b")
    await world.drain(1)
    for _ in range(3):
        with pytest.raises(PeerLost, match="no trainer rank"):
            await world.coordinator._planner.agree("a", {}, {}, _Ever())  # type: ignore[arg-type]
    assert (await world.publish(1, 5.0)).ok
    world.check()


class _Ever:
    """A limit without an end."""

    seconds, at, left = 1e9, 1e9, 1e9

    def remaining(self, what: str) -> float:
        return 1e9


@virtual
async def test_a_trainer_that_hangs_does_not_hold_up_its_successor() -> None:
    world = World(RoundSettings(run="test", grace=1.0, timeout=300.0))
    world.delays["a/0", "prepare"] = 250.0  # it reads from a trainer that is stopped
    world.add_trainers(1)
    world.add_replica("a")
    await world.drain(1)
    world.trainers["trainer/0"].disconnect()
    world.trainers.clear()
    world.delays.clear()
    world.add_trainers(1)
    assert (await world.publish(1, 10.0)).ok
    world.check()


@virtual
async def test_a_plan_that_could_not_be_prepared_takes_the_place_of_the_one_before() -> None:
    """The rank has dropped its old plan for the new one: if the old trainer comes back, it must prepare again."""
    world = world_of("a")
    assert (await world.publish(1, 5.0)).ok
    replica = world.coordinator._members.replicas["a"]
    link = replica.links[0]
    before = link.prepared
    assert before is not None
    world.trainers["trainer/0"].disconnect()
    world.trainers.clear()
    world.faults["a/0", "prepare"] = "fail"
    world.add_trainers(1)
    await world.drain(1)
    assert link.prepared is None
    world.check()


@virtual
async def test_an_unexpected_error_of_work_that_nobody_waits_for_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    world = world_of("a")
    monkeypatch.setattr("weightsync.coordinator.agreement.prepare", broken)
    world.add_replica("b")
    await world.drain(1)
    assert "_prepare ended by an unexpected error" in caplog.text
    assert (await world.publish(1, 5.0)).ok, "the round prepares by itself"
    caplog.clear()
    monkeypatch.setattr(world.coordinator, "_seed", broken)
    world.add_replica("c")
    await world.drain(1)
    assert "_seed_in_background ended by an unexpected error" in caplog.text
    world.check()


def test_memory_given_back_by_a_collection_in_the_middle_does_not_hang() -> None:
    room = PlanMemory(1000)

    class Dropped:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            room.give(0)

    with room._lock:  # as inside take
        Dropped()
        gc.collect()
    room.take(1000)
    with pytest.raises(ConfigurationError):
        room.take(1)


@virtual
async def test_a_plan_that_nobody_uses_any_more_makes_room_for_the_next() -> None:
    world = world_of("a")
    assert (await world.publish(1, 5.0)).ok
    planner: Planner = world.coordinator._planner
    taken = planner.room.taken
    assert taken > 0
    planner.room.nbytes = 3 * taken  # the plan in the making takes all of it
    for number in (2, 3):
        world.trainers["trainer/0"].disconnect()
        world.trainers.clear()
        world.add_trainers(1)
        await world.drain(1)
        assert (await world.publish(number, 5.0)).ok
        assert planner.room.taken == taken
    world.check()


def asked_to_let_go(world: World) -> list[str]:
    return [member for _, member, phase in world.log if phase == "let_go"]


@virtual
async def test_replicas_let_go_of_the_adapters_of_a_publisher_that_ends() -> None:
    world = world_of("a", "b")
    assert (await world.publish(1, 5.0)).ok
    for rank in [Publisher(world, rank) for rank in range(2)]:
        world.coordinator.leave(rank, "killed")
    await asyncio.sleep(1.1)
    assert sorted(asked_to_let_go(world)) == ["a/0", "b/0"]
    world.log.clear()
    assert (await world.publish(2, 5.0)).ok
    assert not [phase for _, _, phase in world.log if phase == "prepare"], "they are prepared for the trainer still"
    world.check()


@virtual
async def test_replicas_let_go_of_a_trainer_that_is_gone_for_the_grace() -> None:
    world = world_of("a", "b")
    assert (await world.publish(1, 5.0)).ok
    world.trainers["trainer/0"].disconnect()
    await asyncio.sleep(0.9)
    assert not asked_to_let_go(world)
    await asyncio.sleep(0.2)
    assert sorted(asked_to_let_go(world)) == ["a/0", "b/0"]
    world.trainers.clear()
    world.add_trainers(1)
    assert (await world.publish(2, 5.0)).ok, "they prepare again"
    world.check()


@virtual
async def test_replicas_keep_what_they_read_of_a_trainer_that_comes_back_within_the_grace() -> None:
    world = world_of("a")
    assert (await world.publish(1, 5.0)).ok
    trainer = world.trainers["trainer/0"]
    trainer.disconnect()
    await asyncio.sleep(0.5)
    trainer.connect()
    await asyncio.sleep(5.0)
    assert not asked_to_let_go(world)
    assert (await world.publish(2, 5.0)).ok
    world.check()


@virtual
async def test_a_rank_that_does_not_let_go_costs_its_replica_nothing() -> None:
    world = world_of("a", "b")
    assert (await world.publish(1, 5.0)).ok
    world.delays["a/0", "let_go"] = 250.0
    world.trainers["trainer/0"].disconnect()
    await asyncio.sleep(2.5)
    assert sorted(asked_to_let_go(world)) == ["b/0"]
    world.delays.clear()
    world.trainers.clear()
    world.add_trainers(1)
    assert (await world.publish(2, 5.0)).ok
    world.check()


async def end_trainer(world: World) -> None:
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
    world.trainers.clear()
    await asyncio.sleep(0.3)


@virtual
async def test_replicas_that_are_not_known_to_be_prepared_let_go_too() -> None:
    """One whose last round failed, and one that reconnected, hold as much as the others."""
    world = world_of("a", "b", "c")
    world.faults["a/0", "move"] = "fail"
    assert [replica.name for replica in (await world.publish(1, 5.0)).replicas if replica.error] == ["a"]
    world.engines["b/0"].disconnect()
    await asyncio.sleep(0.1)
    world.engines["b/0"].connect()
    await asyncio.sleep(3.0)
    await end_trainer(world)
    await asyncio.sleep(2.0)
    assert sorted(asked_to_let_go(world)) == ["a/0", "b/0", "c/0"]


@virtual
async def test_a_replica_that_joins_where_no_trainer_is_lets_go() -> None:
    """Its coordinator may be new: the last one was in the process of the trainer."""
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_replica("a")
    await asyncio.sleep(2.0)
    assert asked_to_let_go(world) == ["a/0"]
    world.add_trainers(1)
    assert (await world.publish(1, 5.0)).ok
    world.check()


@virtual
async def test_many_that_join_or_leave_at_a_time_are_asked_once_or_twice() -> None:
    """Each that joined, and each trainer rank that left, had all replicas asked: a million calls for a thousand engines."""
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    replicas = [f"r{number}" for number in range(8)]
    for name in replicas:
        world.add_replica(name)
        await asyncio.sleep(0.05)
    await asyncio.sleep(5.0)
    assert asked_to_let_go(world) == [f"{name}/0" for name in replicas]
    world.add_trainers(8)
    assert (await world.publish(1, 5.0)).ok
    world.log.clear()
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
        await asyncio.sleep(0.2)
    await asyncio.sleep(5.0)
    assert sorted(asked_to_let_go(world)) == sorted(2 * [f"{name}/0" for name in replicas])


@virtual
async def test_what_a_successor_prepared_within_the_grace_stays() -> None:
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.add_trainers(2)
    world.add_replica("a")
    assert (await world.publish(1, 5.0)).ok
    await end_trainer(world)
    world.add_trainers(1)
    assert (await world.publish(2, 5.0)).ok
    await asyncio.sleep(5.0)
    assert not asked_to_let_go(world)


@virtual
async def test_a_successor_that_a_replica_does_not_match_leaves_it_nothing_to_hold() -> None:
    world = world_of("a")
    assert (await world.publish(1, 5.0)).ok
    await end_trainer(world)
    world.add_trainers(1, Manifest(list(MANIFEST)[:-1]))
    await asyncio.sleep(5.0)
    assert asked_to_let_go(world) == ["a/0"]


@virtual
async def test_a_rank_that_hangs_as_it_lets_go_holds_up_no_round_of_the_others() -> None:
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0, require="any"))
    world.add_trainers(1)
    for name in ("a", "b"):
        world.add_replica(name)
    assert (await world.publish(1, 5.0)).ok
    world.delays["a/0", "let_go"] = 250.0
    await end_trainer(world)
    await asyncio.sleep(0.75)
    world.add_trainers(1)
    assert not world.coordinator.status().busy
    result = await world.publish(2, 0.8)
    assert not {replica.name: replica.error for replica in result.replicas}["b"]


@virtual
async def test_a_coordinator_that_is_closed_asks_nobody_to_let_go() -> None:
    world = world_of("a")
    assert (await world.publish(1, 5.0)).ok
    await world.coordinator.aclose()
    await end_trainer(world)
    assert not world.coordinator._tasks


@virtual
async def test_a_replica_that_could_not_read_from_another_tries_again_while_no_trainer_is_there() -> None:
    world = World(RoundSettings(run="test", grace=1.0, timeout=30.0))
    world.serving = ("a",)
    world.add_trainers(1)
    world.add_replica("a")
    assert (await world.publish(1, 5.0)).ok
    await end_trainer(world)
    world.faults["b/0", "move"] = "fail"
    world.add_replica("b")
    await asyncio.sleep(100.0)
    assert world.states() == {"a": ("loaded", 1), "b": ("loaded", 1)}
