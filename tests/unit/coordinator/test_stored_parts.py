"""Holds which trainer ranks' parts make a stored version: those of the processes that placed it."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.fakes import World, world_of
from tests.virtual_time import virtual

from weightsync.coordinator import Coordinator
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.errors import StaleSource
from weightsync.model.stored import StoredObject
from weightsync.protocol.messages import Body
from weightsync.protocol.store_messages import SignedManifest, StorePart
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
