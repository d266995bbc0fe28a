"""Holds that all ranks of a replica serve a version of an adapter, or none: also when one reconnects while others register it."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.lora_fakes import LonePublisher, LoraEngine
from tests.virtual_time import virtual

from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.model import Version
from weightsync.protocol.lora_messages import PrepareLora, RegisterLora
from weightsync.protocol.messages import Body


@virtual
@pytest.mark.parametrize("restarted", [True, False])
async def test_a_rank_that_reconnects_while_another_registers_keeps_the_version_from_all(restarted: bool) -> None:
    """The other's answer counted for both: the version was called served, and the replica never got it."""
    world, registered, registers = World(), asyncio.Event(), asyncio.Event()
    quick, slow = (LoraEngine(world, "r0", place=(rank, 2)) for rank in range(2))

    async def late(body: Body) -> None:
        if isinstance(body, RegisterLora) and not registered.is_set():
            registers.set()
            await registered.wait()

    slow.before = late
    publishing = asyncio.ensure_future(LonePublisher(world, "1").publish())
    await registers.wait()
    await asyncio.sleep(1)
    quick.leave(clean=False)
    if restarted:
        quick.served.clear()
    quick.join()
    await asyncio.sleep(1)
    registered.set()
    await asyncio.wait([publishing])
    await asyncio.sleep(5)
    assert quick.known == slow.served.keys() == quick.served.keys()


@virtual
async def test_a_rank_that_reconnects_keeps_what_it_got_on_a_later_base() -> None:
    """It reported the later base, and the coordinator knew the other rank's version by the earlier: all ranks dropped it."""
    world = World()
    earlier, later = (Version("test", number, MANIFEST.fingerprint, f"{number:016x}") for number in (1, 2))
    LoraEngine(world, "r0", serving=earlier)
    publisher = LonePublisher(world, "1")
    publisher.base = earlier
    await publisher.publish()
    ranks = [LoraEngine(world, "r1", place=(rank, 2), serving=later) for rank in range(2)]
    await asyncio.sleep(1)
    assert [engine.served.keys() for engine in ranks] == [{"alice/math@0"}] * 2
    publisher.leave()
    ranks[0].leave(clean=False)
    ranks[0].join()
    await asyncio.sleep(1)
    assert [engine.served.keys() for engine in ranks] == [{"alice/math@0"}] * 2
    assert ranks[0].known == {"alice/math@0"}


@virtual
async def test_a_late_replica_gets_the_version_before_one_that_no_replica_could_take() -> None:
    """Nothing was placed, so the publisher still held it, and the coordinator had forgotten that."""
    world = World()
    engine, publisher = LoraEngine(world, "r0"), LonePublisher(world, "1")
    await publisher.publish()

    async def full(body: Body) -> None:
        if isinstance(body, PrepareLora):
            raise ConfigurationError("all slots are in use")

    engine.before = full
    with pytest.raises(RoundFailed, match="its number is free"):
        await publisher.publish()
    late = LoraEngine(world, "r1")
    await asyncio.sleep(1)
    assert late.served.keys() == late.known == {"alice/math@0"}
