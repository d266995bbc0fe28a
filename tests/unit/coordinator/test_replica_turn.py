"""Holds that a tenant whose processes stand still delays no other tenant's adapters for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.lora_fakes import LonePublisher, LoraEngine
from tests.virtual_time import virtual

from weightsync.coordinator.lora_round import ReplicaTurn
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.errors import DeadlineExceeded
from weightsync.protocol.lora_messages import PrepareLora, StageLora
from weightsync.protocol.messages import Body

ALICE, BOB = "alice/*", "bob/*"


async def forever(body: Body) -> None:
    await asyncio.get_running_loop().create_future()


def tenants(world: World, sources: int) -> tuple[list[LonePublisher], LonePublisher]:
    alices = [LonePublisher(world, f"{number} (alice:*)", limits=ALICE) for number in range(sources)]
    return alices, LonePublisher(world, "b (bob:*)", limits=BOB)


async def seconds_of(publisher: LonePublisher, name: str = "bob/code") -> float:
    started = asyncio.get_running_loop().time()
    result = await publisher.publish(name, timeout=30)
    assert all(one.error is None for one in result.replicas)
    return asyncio.get_running_loop().time() - started


@virtual
async def test_a_tenant_that_does_not_place_keeps_no_other_waiting() -> None:
    world = World()
    engine = LoraEngine(world, "r0")
    alices, bob = tenants(world, 5)
    let = asyncio.Event()

    async def late(body: Body) -> None:
        await let.wait()

    for alice in alices:
        alice.before = late
    waiting = [asyncio.ensure_future(alice.publish(f"alice/x{n}", timeout=60)) for n, alice in enumerate(alices)]
    await asyncio.sleep(1)
    assert await seconds_of(bob) < 2
    let.set()
    for result in await asyncio.gather(*waiting):
        assert all(one.error is None for one in result.replicas)  # they were prepared again
    assert len(engine.served) == 6


@pytest.mark.parametrize(("kind", "bound"), [(PrepareLora, 11), (StageLora, 22)])
@virtual
async def test_a_tenant_whose_source_is_silent_keeps_others_waiting_once_and_not_for_long(kind: Any, bound: float) -> None:
    world = World()
    engine = LoraEngine(world, "r0")
    alices, bob = tenants(world, 5)
    theirs = {alice.rank.member for alice in alices}
    reading = [""]

    async def connects(body: Body) -> None:
        if isinstance(body, PrepareLora):
            (source,) = body.plan.sources
            reading[0] = source.member
        if isinstance(body, kind) and reading[0] in theirs:
            await forever(body)

    engine.before = connects
    waiting = [asyncio.ensure_future(alice.publish(f"alice/x{n}", timeout=200)) for n, alice in enumerate(alices)]
    await asyncio.sleep(0.5)
    assert await seconds_of(bob) < bound
    assert "bob/code@0" in engine.served
    for publication in waiting:
        publication.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@virtual
async def test_a_replica_that_joins_late_gets_the_others_adapters_soon() -> None:
    world = World()
    LoraEngine(world, "r0")
    alices, bob = tenants(world, 4)
    for number, alice in enumerate(alices):
        await alice.publish(f"alice/x{number}")
    await bob.publish("bob/code")
    names = {f"alice/x{number}" for number in range(4)}

    async def silent(body: Body) -> None:
        if isinstance(body, StageLora) and body.name in names:
            await forever(body)

    late = LoraEngine(world, "late", before=silent)
    await asyncio.sleep(25)
    assert "bob/code@0" in late.served


@virtual
async def test_turns_go_round_the_tenants() -> None:
    turn, order = ReplicaTurn(), list[str]()
    limit = RoundDeadline(100)

    async def use(tenant: str, what: str) -> None:
        async with turn.taken(tenant, limit):
            order.append(what)
            await asyncio.sleep(1)

    users = [asyncio.ensure_future(use("a", f"a{number}")) for number in range(3)]
    await asyncio.sleep(0.1)
    users += [asyncio.ensure_future(use("b", f"b{number}")) for number in range(2)]
    await asyncio.gather(*users)
    assert order == ["a0", "b0", "a1", "b1", "a2"]


@virtual
async def test_who_gives_up_waiting_wants_nothing_any_more() -> None:
    turn, work = ReplicaTurn(), asyncio.get_running_loop().create_future()
    async with turn.taken("a", RoundDeadline(100)):
        with pytest.raises(DeadlineExceeded, match="another adapter's turn"):
            async with turn.taken("b", RoundDeadline(1)):
                raise AssertionError
        looking = asyncio.ensure_future(turn.until_wanted(work, 0))
        await asyncio.sleep(1)
        assert not looking.done()
        work.set_result(None)
        assert await looking
    async with turn.taken("c", RoundDeadline(0.1)):
        pass
