"""Holds that a replica which goes back to the version before is updated by the next round, whatever becomes of this one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.unit.coordinator.fakes import FakeEngine, world_of
from tests.virtual_time import virtual

from weightsync.coordinator.agreement import StagedDelta
from weightsync.coordinator.publications import Delta, Publications
from weightsync.coordinator.replicas import Replica
from weightsync.errors import Aborted
from weightsync.protocol.messages import Body, ChangedWords, Done, Revert


@pytest.fixture(autouse=True)
def reverting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every replica that serves has staged a delta, and takes a second to go back. Members that were asked to."""
    asked: list[str] = []
    answer = FakeEngine.call

    async def call(self: FakeEngine, body: Body, timeout: float) -> Body:
        if not isinstance(body, Revert):
            return await answer(self, body, timeout)
        asked.append(self.process.member)
        await asyncio.sleep(1.0)
        self.process.label = body.base
        self.process.content[:] = body.base.number
        return Done()

    async def stage(replica: Replica, *_: object) -> StagedDelta | None:
        return None if replica.version is None else StagedDelta(replica.version, {}, reversible=True)

    def deltas(publications: Publications, _: object) -> tuple[Delta, ...]:
        words = ChangedWords(1, 0, 0, 0, 1, 0, 0, 0, 0, 1)
        return tuple(Delta(version, {"trainer/0": words}) for version in publications.published.values())

    monkeypatch.setattr(FakeEngine, "call", call)
    monkeypatch.setattr("weightsync.coordinator.round.stage", stage)
    monkeypatch.setattr(Publications, "deltas", deltas)
    yield asked


@virtual
async def test_a_replica_that_went_back_takes_the_next_version(reverting: list[str]) -> None:
    world = world_of(1, r=2)
    assert (await world.publish(1)).ok
    world.faults["r/0", "move"] = "fail"
    assert not (await world.publish(2)).ok
    assert sorted(reverting) == ["r/0", "r/1"]
    assert world.states() == {"r": ("loaded", 1)}
    assert (await world.publish(3)).ok
    world.check()


@virtual
async def test_a_publication_that_comes_while_a_replica_goes_back_updates_it(reverting: list[str]) -> None:
    """The replica was neither back nor out of service, and no round could take it in any more until it reconnected."""
    world = world_of(1, r=2)
    assert (await world.publish(1)).ok
    world.faults["r/0", "move"] = "fail"
    assert not (await world.publish(2)).ok
    reverting.clear()
    world.faults["r/0", "move"] = "fail"
    seeding = asyncio.ensure_future(world.coordinator.seed(["r"], 30.0))
    await asyncio.sleep(0.5)
    assert sorted(reverting) == ["r/0", "r/1"]
    assert (await world.publish(3)).ok
    with pytest.raises(Aborted, match="took precedence"):
        await seeding
    assert world.states() == {"r": ("loaded", 3)}
    world.check()
