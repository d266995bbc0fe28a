"""Holds what is remembered of an adapter's name: a number is used once, and what engines report counts while they are connected."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import EngineProcess, FakeEngine, World
from tests.unit.coordinator.lora_fakes import LonePublisher, LoraEngine
from tests.unit.coordinator.test_adapters_in_step import Publisher
from tests.virtual_time import virtual

from weightsync.coordinator.adapter_names import AdapterName
from weightsync.coordinator.loras import Loras
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.ranks import EngineRank
from weightsync.coordinator.report import round_result
from weightsync.coordinator.round_context import RoundContext
from weightsync.errors import Aborted, AuthenticationError, ConfigurationError, RoundFailed, VersionError
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.lora_messages import DropLora, HeldLora
from weightsync.protocol.messages import Body, CannotPublish, Done, Publish, RoundResult

NAME = "a/x"
SPEC = AdapterSpec(NAME, LoraConfig(2, 4.0), None, "keep")
HUGE = (1 << 62) + 1


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of adapters only place."""

    class Placed:
        def __init__(self, context: RoundContext, *_: object) -> None:
            self.context = context

        async def run(self) -> RoundResult:
            context = self.context
            version = Version(NAME, context.number, "0" * 32, f"{context.number:016x}")
            context.publications.hold(Placement(version, np.zeros(1, np.uint64), {}))
            return round_result(context.round, version, 0, [], 0.0, 0.0, None)

    monkeypatch.setattr("weightsync.coordinator.loras.LoraRound", Placed)


def reporting(world: World, number: int, ranks: int = 1, names: Sequence[str] = (NAME,)) -> list[EngineProcess]:
    """An engine whose first rank says that it serves this version of the adapters of these names."""
    processes = []
    for rank in range(ranks):
        process = EngineProcess(world, "r", rank, ranks, f"e{rank}", "auto", MANIFEST)
        if rank == 0:
            honest = process.make()
            held = tuple(HeldLora(Version(name, number, "0" * 32, "0" * 16), SPEC) for name in names)
            hello = structs.replace(honest.hello, loras=held)
            said = EngineRank(hello, honest.manifest, honest.layout, None)
            process.make = lambda said=said: said  # type: ignore[misc]
        process.connect()
        processes.append(process)
    return processes


async def number_of(loras: Loras, *asked: tuple[Publisher, int | None]) -> int:
    """The number of what these ranks publish together."""

    async def publish(publisher: Publisher, number: int | None) -> int:
        request = publisher.requests.make(number, None, None)
        request = structs.replace(request, call=next(publisher.calls), adapter=SPEC)
        assert isinstance(request, Publish)
        answer = await loras.handle(publisher.rank.member, request, 30.0)
        return answer.result.version.number  # type: ignore[union-attr]

    (number,) = set(await asyncio.gather(*(publish(*each) for each in asked)))
    return number


@pytest.mark.parametrize("reported", [5, HUGE])
@pytest.mark.usefixtures("placed")
@virtual
async def test_an_engine_that_leaves_before_the_first_publication_does_not_have_numbers_used_again(reported: int) -> None:
    """Versions were counted in one place and remembered in another one: all were @0, with other bytes each time."""
    world = World()
    loras = world.coordinator.loras
    (engine,) = reporting(world, reported)
    first, second = (Publisher(world, rank) for rank in (0, 1))
    waits = asyncio.ensure_future(number_of(loras, (first, None)))
    await asyncio.sleep(1)
    engine.disconnect()
    numbers = [await number_of(loras, (second, None))]
    assert await waits == numbers[0]
    numbers += [await number_of(loras, (first, None), (second, None)) for _ in range(2)]
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("placed")
@virtual
async def test_what_an_engine_reported_counts_until_it_leaves(ranks: int) -> None:
    """What not all of its ranks report, too: else a numbered publication would be refused for ever."""
    world = World()
    loras = world.coordinator.loras
    engines = reporting(world, 1 << 62, ranks)
    both = [(Publisher(world, rank), 3) for rank in (0, 1)]
    with pytest.raises(VersionError, match="the last one is 4611686018427387904"):
        await number_of(loras, *both)
    for engine in engines:
        engine.disconnect()
    assert await number_of(loras, *both) == 3


@virtual
async def test_a_rank_is_asked_to_drop_many_names_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends the connection at more than 64 calls at a time. It reconnected, and reported as many again."""
    running: Counter[str] = Counter()
    most, dropped, answer = [0], list[str](), FakeEngine.call

    async def call(self: FakeEngine, body: Body, timeout: float) -> Body:
        if not isinstance(body, DropLora):
            return await answer(self, body, timeout)
        running[self.process.member] += 1
        most[0] = max(most[0], running[self.process.member])
        await asyncio.sleep(0.01)
        running[self.process.member] -= 1
        dropped.append(body.name)
        return Done()

    monkeypatch.setattr(FakeEngine, "call", call)
    world = World()
    names = [f"a/x{number}" for number in range(100)]
    reporting(world, 1, 2, names)
    await asyncio.sleep(10)
    assert sorted(dropped) == sorted(2 * names)
    assert most == [1]


@virtual
async def test_a_name_of_which_no_version_is_known_is_forgotten_with_who_asked_for_it() -> None:
    """There is room for so many names, and anybody may ask. The other rank is told of the failure when it asks."""
    world = World()
    loras = world.coordinator.loras
    first, second = (Publisher(world, rank) for rank in (0, 1))
    await loras.handle(first.rank.member, CannotPublish(None, "Aborted", "no memory", count=1, adapter="b/y"), 1.0)
    assert set(loras._names) == {"b/y"}
    with pytest.raises(Aborted, match="no memory"):
        await loras.handle(second.rank.member, Publish(None, 1, count=1, adapter=structs.replace(SPEC, name="b/y")), 1.0)
    world.coordinator.leave(first, clean=True)
    world.coordinator.leave(second, clean=True)
    assert not loras._names


@virtual
async def test_a_lone_rank_that_cannot_publish_or_fails_takes_up_no_name() -> None:
    world = World()
    names = world.coordinator.loras._names
    publisher = LonePublisher(world, "1")
    for number in range(3):
        await publisher.cannot(f"b/y{number}")
        assert not names
    with pytest.raises(RoundFailed, match="its number is free"):
        await publisher.publish("b/y")
    assert not names


@virtual
async def test_a_tenant_uses_up_its_own_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token filled the table for all, and what engines reported of further names was not believed."""
    monkeypatch.setattr("weightsync.coordinator.adapter_names.MOST_NAMES_OF_A_TENANT", 3)
    world = World()
    LoraEngine(world, "r0")
    alice, bob = LonePublisher(world, "1 (alice:*)", limits="alice/*"), LonePublisher(world, "2 (bob:*)", limits="bob/*")
    for number in range(3):
        await alice.publish(f"alice/x{number}")
    with pytest.raises(ConfigurationError, match=r"3 names of adapters were published with this token, .*keep=0"):
        await alice.publish("alice/x3")
    await bob.publish("bob/code")
    await alice.retire("alice/x0", 0)
    await alice.publish("alice/x3")
    monkeypatch.setattr("weightsync.coordinator.adapter_names.MOST_NAMES", 4)
    with pytest.raises(ConfigurationError, match="this run knows 4 names of adapters already, so bob/more cannot be added"):
        await bob.publish("bob/more")
    served = {"eve/y@0": Version("eve/y", 0, "0" * 32, "0" * 16)}
    assert LoraEngine(world, "r1", served).known >= served.keys()


@virtual
async def test_of_a_name_that_is_retired_everywhere_only_the_last_number_is_kept() -> None:
    world = World()
    names = world.coordinator.loras._names
    engine, publisher = LoraEngine(world, "r0"), LonePublisher(world, "1")
    served = (await publisher.publish()).version
    assert (await publisher.retire(keep=0)).numbers == (0,)
    assert not names
    assert not (await publisher.retire(keep=0)).numbers  # twice does no harm
    late = LoraEngine(world, "r1", {str(served): served})  # it was away
    await asyncio.sleep(1)
    assert not late.served
    assert not late.known
    assert (await publisher.publish()).version.number == 1
    assert names.keys() == {"alice/math"}
    assert set(engine.served) == {"alice/math@1"}
    engine.leave()
    late.leave()
    publisher.leave()
    assert names.keys() == {"alice/math"}  # the engine may come back
    assert not (await LonePublisher(world, "2").retire(keep=0)).numbers
    assert not names


@virtual
async def test_a_publisher_that_was_revoked_does_not_come_back() -> None:
    """Its source was forgotten with it, and with the source the revocation."""
    world = World()
    LonePublisher(world, "1", session="stolen")
    world.coordinator.revoke("adapters:1/0")
    with pytest.raises(AuthenticationError, match="was revoked"):
        LonePublisher(world, "1", session="stolen")
    LonePublisher(world, "1", session="another")


def test_nothing_is_retired_where_fewer_versions_are_than_are_kept() -> None:
    record = AdapterName("")
    assert not record.retire({0, 1}, 3)
    assert record.retired == -1
