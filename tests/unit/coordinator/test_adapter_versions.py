"""Holds that a label of an adapter means the same bytes everywhere, when publishers and replicas fail, leave or come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.lora_fakes import NAME, LonePublisher, LoraEngine
from tests.virtual_time import virtual

from weightsync.errors import LoadError, VersionError
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.lora_messages import DropLora, PrepareLora, RegisterLora, StageLora
from weightsync.protocol.messages import Body, Place, Publish


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


async def published_before() -> Version:
    """What an earlier coordinator had published as the first version."""
    world = World()
    LoraEngine(world, "r0")
    return (await LonePublisher(world, "1", content=1).publish()).version


@virtual
async def test_a_replica_that_comes_back_with_other_bytes_gets_those_that_were_published() -> None:
    """It was away when the coordinator was restarted, and was believed: it served other weights under the same label."""
    before, world = await published_before(), World()
    LoraEngine(world, "r0")
    result = await LonePublisher(world, "1", content=2).publish()
    assert str(result.version) == str(before) == "alice/math@0"
    late = LoraEngine(world, "r1", {"alice/math@0": before})
    await asyncio.sleep(5)
    assert late.served == {"alice/math@0": result.version}
    assert late.known == {"alice/math@0"}


@virtual
async def test_a_replica_that_comes_back_with_other_bytes_during_the_publication_drops_them() -> None:
    before, world = await published_before(), World()
    LoraEngine(world, "r0")
    publisher = LonePublisher(world, "1", content=2)
    back: list[LoraEngine] = []

    async def comes_back(body: Body) -> None:
        back.append(LoraEngine(world, "r1", {"alice/math@0": before}))

    publisher.before = comes_back
    result = await publisher.publish()
    await asyncio.sleep(5)
    assert str(result.version) == "alice/math@0"
    assert back[0].served == {"alice/math@0": result.version}


@virtual
async def test_replicas_that_report_other_bytes_under_one_label_do_not_both_serve_it() -> None:
    """Neither was published by this coordinator, so it does not know which is right; a request must not depend on its replica."""
    before, world = await published_before(), World()
    first = LoraEngine(world, "r0", {"alice/math@0": before})
    second = LoraEngine(world, "r1", {"alice/math@0": structs.replace(before, digest="0123456789abcdef")})
    same = LoraEngine(world, "r2", {"alice/math@0": before})
    await asyncio.sleep(5)
    assert (first.known, second.known, same.known) == ({"alice/math@0"}, set(), {"alice/math@0"})


@virtual
async def test_a_late_replica_that_hangs_delays_no_other_late_one() -> None:
    world = World()
    LoraEngine(world, "r0")
    for number in range(3):
        await LonePublisher(world, str(number), limits="alice/*").publish(f"alice/{number}")

    async def hang(body: Body) -> None:
        if isinstance(body, RegisterLora):
            await asyncio.sleep(3600)

    LoraEngine(world, "r1", before=hang)
    late = LoraEngine(world, "r2")
    await asyncio.sleep(5)
    assert len(late.served) == 3


def refusing(kind: type, times: int) -> Callable[[Body], Awaitable[None]]:
    """Fail so many calls of a kind."""
    left = [times]

    async def before(body: Body) -> None:
        if isinstance(body, kind) and left[0]:
            left[0] -= 1
            raise LoadError("out of memory")

    return before


@virtual
async def test_a_replica_that_missed_a_version_gets_it_at_once() -> None:
    world = World()
    LoraEngine(world, "r0")
    missed = LoraEngine(world, "r1")
    publisher = LonePublisher(world, "1")
    missed.before = refusing(StageLora, 1)
    result = await publisher.publish()
    assert [one.name for one in result.replicas if one.error] == ["r1"]
    await asyncio.sleep(5)
    assert set(missed.served) == missed.known == {"alice/math@0"}


@virtual
async def test_a_replica_that_missed_newer_versions_keeps_its_newest_until_it_has_them() -> None:
    """It lost its only version to a trainer that keeps one, and answered no request for the name any more."""
    world = World()
    up, missed = LoraEngine(world, "r0"), LoraEngine(world, "r1")
    publisher = LonePublisher(world, "1")
    await publisher.publish()
    missed.before = refusing(StageLora, 2)
    await publisher.publish()
    await asyncio.sleep(5)
    assert (await publisher.retire(keep=1)).numbers == (0,)
    assert set(up.served) == {"alice/math@1"}
    assert set(missed.served) == missed.known == {"alice/math@0"}
    LoraEngine(world, "r2")  # with it, the source is asked again
    await asyncio.sleep(5)
    assert set(missed.served) == missed.known == {"alice/math@1"}
    assert (await publisher.retire(keep=0)).numbers == (1,)
    await asyncio.sleep(5)
    assert not up.served
    assert not missed.served


@virtual
async def test_what_is_retired_before_a_replica_got_it_is_not_brought_to_it() -> None:
    world = World()
    missed = LoraEngine(world, "r0")
    publisher = LonePublisher(world, "1")
    missed.before = refusing(StageLora, 2)
    await publisher.publish()
    await asyncio.sleep(5)
    assert not (await publisher.retire(keep=0)).numbers
    late = LoraEngine(world, "r1")
    await asyncio.sleep(5)
    assert not late.served
    assert (await publisher.publish()).version.number == 1


@virtual
async def test_a_rank_gets_one_call_at_a_time_however_many_versions_are_retired() -> None:
    """Its agent ends the connection at more than 64 calls."""
    world = World()
    engine = LoraEngine(world, "r0")
    publisher = LonePublisher(world, "1")
    for number in range(70):
        await publisher.publish(f"alice/n{number}")
    await publisher.publish("alice/n0")
    let, running, most = asyncio.Event(), [0], [0]

    async def busy(body: Body) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await let.wait()
        running[0] -= 1

    engine.before = busy
    retired = [asyncio.ensure_future(publisher.retire(f"alice/n{number}", 1)) for number in (0,)]
    retired += [asyncio.ensure_future(publisher.retire(f"alice/n{number}", 0)) for number in range(70)]
    await asyncio.sleep(1)
    let.set()
    await asyncio.gather(*retired)
    assert not engine.served
    assert most == [1]
    drops = [(call.name, call.numbers) for call in engine.calls if isinstance(call, DropLora)]
    assert len(drops) == 71
    assert not engine.known


@virtual
async def test_a_number_that_is_free_again_is_not_dropped_by_a_late_call() -> None:
    """A call to drop what had been prepared waited behind another one, and dropped the next version of the same number."""
    world = World()
    engine = LoraEngine(world, "r0")
    publisher, other = LonePublisher(world, "1"), LonePublisher(world, "2")
    await other.publish("bob/code")
    let = asyncio.Event()

    async def busy(body: Body) -> None:
        if isinstance(body, DropLora) and body.name == "bob/code":
            await let.wait()

    engine.before = busy
    retiring = asyncio.ensure_future(other.retire("bob/code", 0))
    publisher.before = refusing(Place, 1)
    with pytest.raises(LoadError):
        await publisher.publish(timeout=10)
    again = asyncio.ensure_future(publisher.publish())
    await asyncio.sleep(1)
    let.set()
    assert (await again).version.number == 0
    await retiring
    assert set(engine.served) == engine.known == {"alice/math@0"}


@pytest.mark.parametrize("known", [False, True])
@virtual
async def test_a_number_that_an_engine_took_and_dropped_is_not_used_again(known: bool) -> None:
    """After a restart of the coordinator the very engine that had served a version got another one under its number."""
    world = World()
    publisher = LonePublisher(world, "1")
    if known:
        LoraEngine(world, "r1")
        assert (await publisher.publish()).version.number == 0
    engine = LoraEngine(world, "r0", taken_loras={"alice/math": 2})
    assert (await publisher.publish()).version.number == 3
    engine.leave()
    assert "alice/math@3" in engine.served


@virtual
async def test_an_older_publication_that_ends_last_leaves_the_newer_configuration() -> None:
    """Its replica hung, and its caller gave up. A late replica got the new bytes with the old scaling."""
    world, let = World(), asyncio.Event()
    publisher = LonePublisher(world, "1", content=1)

    async def slow(body: Body) -> None:
        if isinstance(body, RegisterLora) and body.version.number == 0:
            await let.wait()
        if isinstance(body, StageLora) and body.number == 1:
            await asyncio.sleep(8)

    LoraEngine(world, "r0")
    LoraEngine(world, "r1", before=slow)

    def ask(call: int, alpha: float) -> asyncio.Future[Body]:
        spec = AdapterSpec(NAME, LoraConfig(2, alpha), None, "keep")
        return asyncio.ensure_future(publisher.ask(Publish(None, call, count=call, adapter=spec), 60))

    first = ask(1, 4.0)
    await asyncio.sleep(1)
    first.cancel()
    publisher.content = 2
    second = ask(2, 16.0)
    await asyncio.sleep(1)
    late = LoraEngine(world, "late")
    await asyncio.sleep(0.5)
    let.set()
    await second
    await asyncio.sleep(100)
    asked = [body.spec.config.alpha for body in late.calls if isinstance(body, PrepareLora) and body.number == 1]
    assert asked and set(asked) == {16.0}
