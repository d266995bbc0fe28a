"""Which trainer ranks' parts make a stored version, and what a coordinator numbers that could not read the store."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.fakes import World, world_of
from tests.virtual_time import virtual

from weightsync.coordinator import Coordinator
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.errors import Aborted, RoundFailed, StaleSource, VersionError
from weightsync.model.stored import StoredObject
from weightsync.protocol.messages import Body, Publish
from weightsync.protocol.store_messages import STORE, SignedManifest, StorePart
from weightsync.store.signing import SigningKey, new_secret

CHAIN = (StoredObject("run/objects/x", "key", 10, 2, bytes(32)),)


async def published() -> World:
    world = world_of(0)
    world.coordinator = Coordinator(world.settings, lambda: SigningKey(new_secret()))
    world.add_trainers(2)
    world.add_replica("r")
    assert (await world.publish(1)).ok
    return world


def part(world: World, rank: int) -> asyncio.Task[Body]:
    asked = world.coordinator.stored.part(f"trainer/{rank}", StorePart(1, 1, CHAIN), RoundDeadline(30.0))
    return asyncio.ensure_future(asked)


@virtual
async def test_a_rank_that_reconnects_between_the_parts_is_the_same_process() -> None:
    """Its version was given up, because of another process that there was not, and rank 0 waited for it until its deadline."""
    world = await published()
    first = part(world, 0)
    await asyncio.sleep(1)
    process = world.trainers["trainer/1"]
    process.disconnect()
    process.connect()
    second = part(world, 1)
    assert isinstance(await first, SignedManifest)
    second.cancel()


@virtual
async def test_a_new_process_has_no_part_in_what_the_old_one_placed() -> None:
    world = await published()
    first = part(world, 0)
    await asyncio.sleep(1)
    world.trainers["trainer/1"].disconnect()
    world.add_trainer(1, 2)
    with pytest.raises(StaleSource, match="another process was trainer/1"):
        await part(world, 1)
    first.cancel()


class _Unread:
    """A store that could not be read when the coordinator started. Its newest version is ``number``."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.why, self.reads = world, number, "it is full of bees", 0
        world.coordinator.stored.read = self.read

    async def read(self) -> str:
        self.reads += 1
        await asyncio.sleep(1)
        if not self.why and self.number >= 0:
            self.world.coordinator._publications.claim("trainer", STORE, 1, self.number)
        return self.why


@virtual
async def test_nothing_is_numbered_before_the_newest_stored_version_is_known() -> None:
    """The coordinator went on below it, and it stayed the newest for all who read the store."""
    world = world_of(2, r=1)
    store = _Unread(world, 7)
    for reads in (1, 2):
        with pytest.raises(RoundFailed, match=r"must be above those in the store, which cannot be read \(it is full of bees\)"):
            await world.publish(1)
        assert store.reads == reads  # for both ranks
    with pytest.raises(RoundFailed, match="it does not answer"):
        await world.publish(1, timeout=0.5)
    store.why = ""
    with pytest.raises(VersionError, match="the last one is 7"):
        await world.publish(1)
    assert (await world.publish(8)).ok
    world.check()


@virtual
async def test_a_rank_that_comes_when_the_store_is_back_hears_at_once_that_another_failed() -> None:
    """It waited until its deadline for a rank that had failed, and was told that this one did not call publish()."""
    world = world_of(2, r=1)
    store = _Unread(world, 7)
    with pytest.raises(RoundFailed, match="cannot be read"):
        await world.coordinator.publish("trainer/0", Publish(None, 1, count=1), 60.0)
    store.why = ""
    with pytest.raises(Aborted, match="trainer/0 failed before it placed its shards: nothing was published"):
        await world.coordinator.publish("trainer/1", Publish(None, 1, count=1), 60.0)
    again = [world.coordinator.publish(member, Publish(None, 2, count=2), 60.0) for member in world.trainers]
    assert [result.version.number for result in await asyncio.gather(*again)] == [8, 8]
    assert asyncio.get_running_loop().time() < 5


@virtual
async def test_an_empty_store_is_read_once() -> None:
    world = world_of(1, r=1)
    store = _Unread(world, -1)
    store.why = ""
    assert (await world.publish(0)).ok
    assert (await world.publish(1)).ok
    assert store.reads == 1


@virtual
async def test_a_trainer_that_knows_the_last_version_waits_for_no_store() -> None:
    world = World()
    world.add_trainers(2, published=3)
    world.add_replica("r")
    store = _Unread(world, 3)
    assert (await world.publish(4)).ok
    assert store.reads == 0
