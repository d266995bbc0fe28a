"""Holds that a publication needs every trainer rank, with one number that goes up, and that nobody waits in vain."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.control.fakes import World
from tests.virtual_time import virtual

from weightsync.errors import DeadlineExceeded, PeerLost, VersionError


@virtual
async def test_twice_and_backwards() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await world.publish(4)
    for number in (4, 3):
        with pytest.raises(VersionError, match="last one is 4"):
            await world.publish(number)
    assert world.states() == {"r": ("loaded", 4)}
    assert (await world.publish(8)).ok
    assert world.state("r").staleness == 0


@virtual
async def test_differing_numbers_fail_everybody_who_asked() -> None:
    world = World()
    world.add_trainers(3)
    asking = [asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 60.0)) for rank in (0, 1)]
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match="trainer/2 publishes version 2"):
        await world.coordinator.publish("trainer/2", 2, 60.0)
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, VersionError)
    assert (await world.publish(2)).version.number == 2


@pytest.mark.parametrize("joined", [False, True])
@virtual
async def test_a_trainer_rank_that_never_comes_is_named(joined: bool) -> None:
    world = World()
    for rank in range(3 if joined else 2):
        world.add_trainer(rank, 3)
    world.add_replica("r")
    asking = [asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 30.0)) for rank in (0, 1)]
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert asyncio.get_running_loop().time() == pytest.approx(30.0)
    for error in ended:
        assert isinstance(error, DeadlineExceeded)
        assert "rank 2" in str(error)
    assert world.states() == {"r": ("registered", None)}


@virtual
async def test_a_trainer_rank_lost_while_others_wait() -> None:
    world = World()
    world.add_trainers(3)
    asking = [asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 30.0)) for rank in (0, 1)]
    await asyncio.sleep(1)
    world.trainers["trainer/1"].disconnect()
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, PeerLost)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)


@virtual
async def test_a_cancelled_publisher_does_not_leave_the_others_waiting() -> None:
    world = World()
    world.add_trainers(3)
    first, second = (asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 30.0)) for rank in (0, 1))
    await asyncio.sleep(1)
    first.cancel()
    with pytest.raises(DeadlineExceeded, match="trainer/0 stopped waiting before trainer rank 2"):
        await second
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)
    with pytest.raises(asyncio.CancelledError):
        await first


@virtual
async def test_a_trainer_rank_that_blinks_in_the_middle_of_a_round_gets_its_result() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    world.delays["r/0", "move"] = 20.0
    first, second = (asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 60.0)) for rank in (0, 1))
    await asyncio.sleep(10)
    second.cancel()  # as the service does when the connection breaks
    old = world.trainers["trainer/1"].node
    world.trainers["trainer/1"].connect()
    world.coordinator.leave(old)
    again = await world.coordinator.publish("trainer/1", 1, 60.0)
    assert again.ok
    assert again == await first
    with pytest.raises(VersionError, match="last one is 1"):
        await world.coordinator.publish("trainer/1", 1, 60.0)
    with pytest.raises(asyncio.CancelledError):
        await second


@virtual
async def test_a_new_trainer_process_does_not_get_the_result_of_the_old_one() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    world.delays["r/0", "move"] = 20.0
    first, second = (asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", 1, 60.0)) for rank in (0, 1))
    await asyncio.sleep(10)
    second.cancel()
    world.trainers["trainer/1"].disconnect()
    world.add_trainer(1, 2)
    with pytest.raises(VersionError, match="last one is 1"):
        await world.coordinator.publish("trainer/1", 1, 60.0)
    await asyncio.wait([first, second], timeout=60)
    world.check()
