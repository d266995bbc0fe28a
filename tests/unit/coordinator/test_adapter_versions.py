"""Holds that a label of an adapter means the same bytes everywhere, whoever publishes, fails, leaves or comes back."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.lora_fakes import LonePublisher, LoraEngine
from tests.virtual_time import virtual

from weightsync.errors import VersionError
from weightsync.protocol.messages import Body, Place


@virtual
async def test_two_sources_of_one_name_get_two_numbers() -> None:
    """Both were numbered before they waited. Replicas served different weights as one version."""
    world = World()
    engine = LoraEngine(world, "r0")
    first, second = LonePublisher(world, "1", content=1), LonePublisher(world, "2", content=2)
    async with world.coordinator._lock:  # a round of the base weights
        waiting = [asyncio.ensure_future(one.publish()) for one in (first, second)]
        await asyncio.sleep(1)
    assert [result.version.number for result in await asyncio.gather(*waiting)] == [0, 1]
    assert len({version.digest for version in engine.served.values()}) == len(engine.served) == 2


@virtual
async def test_a_source_that_places_after_a_later_version_is_refused() -> None:
    world = World()
    engine = LoraEngine(world, "r0")
    slow, quick = LonePublisher(world, "1", content=1), LonePublisher(world, "2", content=2)
    let = asyncio.Event()

    async def late(body: Body) -> None:
        await let.wait()

    slow.before = late
    LoraEngine(world, "r1")
    waiting = asyncio.ensure_future(slow.publish(number=5))
    await asyncio.sleep(0.1)
    world.coordinator.loras._turns.clear()  # as if other replicas took the later one
    later = asyncio.ensure_future(quick.publish(number=7))
    await asyncio.sleep(1)
    let.set()
    with pytest.raises(VersionError, match="alice/math@5 cannot be published: the last one is 7"):
        await waiting
    assert (await later).version.number == 7
    assert set(engine.served) == {"alice/math@7"}
    late_engine = LoraEngine(world, "r2")
    await asyncio.sleep(1)
    assert set(late_engine.served) == {"alice/math@7"}


@virtual
async def test_a_number_that_a_replica_brings_while_it_waits_is_not_published() -> None:
    world = World()
    LoraEngine(world, "r0")
    first = LonePublisher(world, "1", content=1)
    served = (await first.publish()).version
    again = World()
    LoraEngine(again, "r1")
    other = LonePublisher(again, "1", content=2)
    async with again.coordinator._lock:
        waiting = asyncio.ensure_future(other.publish())
        await asyncio.sleep(1)
        engine = LoraEngine(again, "r0", {str(served): served})
    with pytest.raises(VersionError, match="alice/math@0 cannot be published: the last one is 0"):
        await waiting
    assert engine.known == {"alice/math@0"}
    assert (await other.publish()).version.number == 1
    assert not [call for call in other.calls if isinstance(call, Place)]
