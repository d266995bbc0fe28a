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
from tests.unit.coordinator.test_adapters_in_step import Publisher
from tests.virtual_time import virtual

from weightsync.coordinator.loras import Loras
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.ranks import EngineRank
from weightsync.coordinator.report import round_result
from weightsync.coordinator.round_context import RoundContext
from weightsync.errors import VersionError
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.lora_messages import DropLora, HeldLora
from weightsync.protocol.messages import Body, Done, Publish, RoundResult

NAME = "a/x"
SPEC = AdapterSpec(NAME, LoraConfig(2, 4.0), None, "keep")
HUGE = (1 << 62) + 1


@pytest.fixture(autouse=True)
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """There is room for so many names, and anybody may ask."""
    world = World()
    loras = world.coordinator.loras
    publisher = Publisher(world, 0)
    loras._barrier(publisher.rank.member, "b/y")
    assert set(loras._names) == {"b/y"}
    world.coordinator.leave(publisher, clean=True)
    assert not loras._names
