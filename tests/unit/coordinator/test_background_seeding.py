"""Who is seeded in the background, from where, and how often: schedules of the simulation with a store found each of these."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.unit.coordinator.contents import MANIFEST, row_digests, rows_layout
from tests.unit.coordinator.fakes import World, world_of
from tests.unit.coordinator.test_sources import MOVE, last, served, sources
from tests.virtual_time import virtual

from weightsync.coordinator import Coordinator
from weightsync.coordinator.stored_versions import STORE_SECONDS
from weightsync.model import Version, fold
from weightsync.model.stored import StoredRank, VersionManifest
from weightsync.protocol.store_messages import STORE
from weightsync.store.signing import SigningKey, StoredVersion, new_secret


def paused(world: World, member: str, after: float) -> int:
    return sum(entry[1:] == (member, "pause") and entry[0] > after for entry in world.log)


@virtual
async def test_a_replica_that_returns_while_its_publication_waits_for_it_is_updated_once() -> None:
    world = world_of(2, r=1)
    assert (await world.publish(1)).ok
    world.engines["r/0"].disconnect()
    world.coordinator._members.replicas["r"]._vanished[0] = asyncio.get_running_loop().time()
    asking = asyncio.ensure_future(world.publish(2))
    await asyncio.sleep(1.0)
    world.add_replica("r")
    started = asyncio.get_running_loop().time()
    assert (await asking).ok
    await world.drain()
    assert world.states() == {"r": ("loaded", 2)}
    assert paused(world, "r/0", started) == 1
    world.check()


@virtual
async def test_a_replica_that_an_operator_seeds_is_not_seeded_again() -> None:
    world = await served("a", "b", serving=("a",))
    world.coordinator._exclude(world.coordinator._members.replicas["b"], "a test says so")
    world.add_trainers(1)
    world.delays["b/0", "move"] = MOVE
    started = asyncio.get_running_loop().time()
    asked = asyncio.ensure_future(world.coordinator.seed(["b"]))
    await asyncio.sleep(MOVE / 2)
    world.trainers["trainer/0"].disconnect()  # whoever serves no version now may have been reading from it
    assert (await asked).ok
    await world.drain()
    assert world.states() == {"a": ("loaded", 1), "b": ("loaded", 1)}
    assert paused(world, "b/0", started) == 1
    world.check()


@virtual
async def test_seeding_that_found_no_source_is_repeated_while_there_is_no_trainer() -> None:
    world = await served()
    world.faults["a/0", "place"] = "fail"
    world.add_replica("new")
    await world.drain(STORE_SECONDS / 2)
    assert world.states()["new"] == ("registered", None)
    await world.drain(STORE_SECONDS)
    assert world.states()["new"] == ("loaded", 1)
    assert sources(last(world)) == {"new": "a"}
    world.check()


@virtual
async def test_a_replica_that_came_and_went_is_not_seeded_more_often_for_that() -> None:
    world = await served()
    for _ in range(12):  # until no keyed digests are left for it, so that it cannot read from a replica
        world.add_replica("new")
        await asyncio.sleep(1.0)
        world.engines["new/0"].disconnect()
        await asyncio.sleep(1.0)
    world.add_replica("new")
    await asyncio.sleep(STORE_SECONDS)
    before = world.coordinator.rounds
    await asyncio.sleep(10 * STORE_SECONDS)
    assert world.states()["new"] == ("registered", None)
    assert world.coordinator.rounds - before <= 11
    world.check()


@virtual
async def test_a_replica_that_comes_and_goes_leaves_a_keyed_digest_to_others() -> None:
    world = await served()
    for _ in range(6):
        world.add_replica("flapping")
        await world.drain(1.0)
        world.engines["flapping/0"].disconnect()
    world.add_replica("b")
    await world.drain(1.0)
    assert world.states()["b"] == ("loaded", 1)
    world.check()


class _WithStore(World):
    """Version 1 can be read from a store."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, lambda: SigningKey(new_secret()))

    def store(self) -> None:
        layout = rows_layout(MANIFEST, 0, 1)
        digests = row_digests(layout, np.full(len(layout), 1, np.int64))
        version = Version("test", 1, MANIFEST.fingerprint, fold(digests))
        ranks = (StoredRank(layout.to_columns(), ()),)
        stored = VersionManifest(version, MANIFEST.tensors, digests.astype("<u8").tobytes(), ranks, time.time())
        self.coordinator.stored.adopt(StoredVersion(stored, MANIFEST, (layout,), digests), "s3://bucket/versions")

    def holder(self, member: str) -> Any:
        return SimpleNamespace(placed=1) if member == f"{STORE}/0" else super().holder(member)


@virtual
async def test_the_store_feeds_a_joiner_when_the_only_replica_with_a_later_version_says_that_it_does_not_serve_it() -> None:
    world = _WithStore(serving=("a",))
    world.add_trainers(2)
    world.add_replica("a")
    assert (await world.publish(1)).ok
    world.store()
    assert (await world.publish(2)).ok
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
    world.engines["a/0"].label = None  # another front drives it
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("loaded", 1)
    assert sources(last(world)) == {"new": STORE}
    assert not world.alarms
