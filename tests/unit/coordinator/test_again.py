"""Holds that a relay may publish the last version again, with the same bytes, and that it tells why no newer one comes."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST, row_digests
from tests.unit.coordinator.fakes import TrainerProcess, World, world_of
from tests.virtual_time import virtual

from weightsync.coordinator.agent_messages import answer_agent
from weightsync.coordinator.ranks import TrainerRank
from weightsync.coordinator.status import RankStatus
from weightsync.errors import ProtocolError, VersionError
from weightsync.model import Version
from weightsync.protocol.messages import Done, Publish, RoundResult
from weightsync.protocol.store_messages import RelayFailing

SECONDS = 60.0


async def again(world: World, version: Version) -> RoundResult:
    return await world.coordinator.publish("trainer/0", Publish(version.number, version=version), SECONDS)


def successor(world: World, last: Version | None) -> TrainerProcess:
    """A new process in place of the trainer's, which knows the last version from elsewhere."""
    for process in list(world.trainers.values()):
        process.disconnect()
    process = TrainerProcess(world, 0, 1, MANIFEST, world.session(), -1)
    process.last, made = last, process.make

    def make() -> TrainerRank:
        rank = made()
        hello = rank.hello if last is None else structs.replace(rank.hello, epoch=last.epoch)
        return TrainerRank(hello, rank.manifest, rank.layout)

    process.make = make
    process.connect()
    return process


@virtual
async def test_who_serves_the_version_is_left_alone_and_who_came_late_gets_it() -> None:
    world = world_of(1, a=2)
    version = (await world.publish(4)).version
    successor(world, version)
    world.add_replica("late")
    world.log.clear()
    result = await again(world, version)
    assert result.ok and result.version == version
    assert world.states() == {"a": ("loaded", 4), "late": ("loaded", 4)}
    assert {member for _, member, phase in world.log if phase not in ("prepare", "letgo")} == {"late/0"}
    replicas = {replica.name: replica for replica in result.replicas}
    assert replicas["a"].error is None and replicas["a"].version == 4 and replicas["a"].staleness == 0
    assert replicas["a"].phases == {} and replicas["late"].nbytes
    assert (await world.publish(5)).ok
    world.check()


@virtual
async def test_no_replica_needs_it() -> None:
    world = world_of(1, a=1)
    version = (await world.publish(4)).version
    successor(world, version)
    result = await again(world, version)
    assert result.ok and [replica.version for replica in result.replicas] == [4]


@virtual
async def test_only_the_last_number_and_only_if_its_bytes_are_known() -> None:
    world = world_of(1, a=1)
    before = (await world.publish(3)).version
    version = (await world.publish(4)).version
    with pytest.raises(VersionError, match="the last one is 4"):
        await again(world, before)
    with pytest.raises(VersionError, match="the last one is 4"):
        await world.publish(4)
    # A coordinator that was restarted knows a number from an engine, and no digest of it.
    (engine,) = world.replica("a")
    engine.disconnect()
    world.coordinator = World(world.settings).coordinator
    engine.connect()
    successor(world, None)
    with pytest.raises(VersionError, match="the last one is 4"):
        await again(world, version)
    successor(world, version)
    assert (await again(world, version)).ok
    assert world.states() == {"a": ("loaded", 4)}


@virtual
async def test_other_bytes_are_no_version() -> None:
    world = world_of(1, a=1)
    version = (await world.publish(4)).version
    process = successor(world, version)
    world.add_replica("late")

    async def other(number: int) -> npt.NDArray[np.uint64]:
        layout = process.node.rank.layout
        return row_digests(layout, np.full(len(layout), number + 1, np.int64))

    process.node.place = other
    with pytest.raises(VersionError, match="was published with another digest already"):
        await again(world, version)
    assert world.states() == {"a": ("loaded", 4), "late": ("registered", None)}
    world.check()


@virtual
async def test_a_signed_version_becomes_no_other_one() -> None:
    """An engine told of a later epoch, and the region served a label that its home never had."""
    version = (await world_of(1, z=1).publish(10)).version
    world = World()
    world.add_replica("honest")
    world.add_replica("odd")
    (odd,) = world.replica("odd")
    odd.disconnect()
    odd.label = Version(version.run, 3, version.manifest, "ab" * 8, 2)
    odd.connect()
    successor(world, version)
    with pytest.raises(VersionError, match="cannot be published: here it would be number 10 of epoch 2"):
        await again(world, version)
    assert world.states()["honest"] == ("registered", None)


@virtual
async def test_a_signed_version_of_a_later_epoch_is_published_although_engines_alone_know_an_earlier_one() -> None:
    """A region was down while home began another epoch: it stayed at the old one (schedule 10,000,011)."""
    before = (await world_of(1, z=1).publish(10)).version
    world = World()
    world.add_replica("a")
    (engine,) = world.replica("a")
    engine.disconnect()
    engine.label = Version(before.run, 10, before.manifest, "ab" * 8)
    engine.connect()
    version = Version(before.run, 10, before.manifest, before.digest, 2)
    successor(world, version)
    result = await again(world, version)
    assert result.ok and result.version == version
    assert (world.state("a").epoch, world.state("a").version) == (2, 10)
    world.check()


@virtual
async def test_a_later_version_is_held_to_its_signature_before_anyone_serves_it() -> None:
    world = world_of(1, a=1)
    version = (await world.publish(4)).version
    other = Version(version.run, 5, version.manifest, "cd" * 8, version.epoch)
    with pytest.raises(VersionError, match="was published with another digest already"):
        await again(world, other)
    assert world.states() == {"a": ("loaded", 4)}
    assert (await world.publish(5)).ok


@virtual
async def test_ranks_that_differ_about_it_publish_a_new_version_or_none() -> None:
    world = world_of(2, a=1)
    version = (await world.publish(4)).version

    async def ask(rank: int, wanted: Version | None) -> RoundResult:
        return await world.coordinator.publish(f"trainer/{rank}", Publish(4, 2, version=wanted, count=2), SECONDS)

    results = await asyncio.gather(ask(0, version), ask(1, None), return_exceptions=True)
    assert all(isinstance(result, VersionError) for result in results), results
    assert world.states() == {"a": ("loaded", 4)}


@virtual
async def test_why_no_newer_version_comes_is_shown_until_one_comes_again_or_the_relay_is_gone() -> None:
    world = world_of(1, a=1)
    await world.publish(4)
    coordinator = world.coordinator
    tell = answer_agent(coordinator, world.trainers["trainer/0"].node.rank)
    for reason in ("TransportError: no store", "TransportError: no bucket"):
        assert isinstance(await tell(RelayFailing(reason), SECONDS), Done)
        (alert,) = coordinator.status().alerts
        assert alert.text == f"trainer/0 relays no newer version: {reason}" and alert.subject == "trainer"
        assert coordinator.gauges().relay_failing
        (rank,) = coordinator.status().trainer
        assert isinstance(rank, RankStatus) and rank.failing is not None and rank.failing[1] == alert.since
    await tell(RelayFailing(""), SECONDS)
    assert coordinator.status().alerts == () and not coordinator.gauges().relay_failing
    await tell(RelayFailing("again"), SECONDS)
    successor(world, None)
    assert not coordinator.gauges().relay_failing
    world.trainers["trainer/0"].disconnect()
    (alert,) = coordinator.status().alerts
    assert alert.kind == "lost"
    with pytest.raises(ProtocolError, match="may not send RelayFailing"):
        await answer_agent(coordinator, world.replica("a")[0].node.rank)(RelayFailing("x"), SECONDS)
