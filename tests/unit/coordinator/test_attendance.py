"""Waits for replicas are few, name few replicas, and share the work of a join."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import world_of
from tests.virtual_time import virtual

from weightsync.coordinator.membership import Membership
from weightsync.coordinator.replicas import Replica
from weightsync.errors import DeadlineExceeded, ManifestMismatch, MembershipError, ProtocolError
from weightsync.model import Manifest
from weightsync.protocol.messages import Call, WaitForReplicas, decode, encode

NAMES = tuple(f"{number:x}" for number in range(4096))


def test_a_wait_names_at_most_so_many_replicas() -> None:
    """A hundred thousand names, kept for up to seven days, in each of 64 calls: half a gigabyte."""
    assert isinstance(decode(encode(Call(1, 1.0, WaitForReplicas(0, NAMES)))), Call)
    for names in ((*NAMES, "more"), ("x" * 201,)):
        with pytest.raises(ProtocolError):
            decode(encode(Call(1, 1.0, WaitForReplicas(0, names))))


@virtual
async def test_a_rank_waits_a_few_times_at_once_and_a_join_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(2)
    asked: list[asyncio.Future[tuple[str, ...]]] = []
    for member in ("trainer/0", "trainer/1"):
        wanted = WaitForReplicas(0, ("a", *NAMES))
        asked += [asyncio.ensure_future(world.coordinator.wait_for_replicas(member, wanted, 60.0)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(MembershipError, match="trainer/0 waits for replicas 8 times already"):
        await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(1), 60.0)

    looks, taking_part = [0], Membership.taking_part

    def counted(self: Membership) -> list[Replica]:
        looks[0] += 1
        return taking_part(self)

    monkeypatch.setattr(Membership, "taking_part", counted)
    world.add_replica("a")
    for _ in range(10):
        await asyncio.sleep(0)
    assert 1 <= looks[0] <= 2
    for wait in asked:
        wait.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(1), 1.0) == ("a",)


@virtual
async def test_a_replica_is_waited_for_until_all_of_its_ranks_are_there_without_a_trainer() -> None:
    world = world_of(0)
    world.add_engine("a", 0, 2)
    with pytest.raises(DeadlineExceeded, match="waited 5 s for a whole replica with tensors; there are: a"):
        await world.coordinator.attendance.whole(5.0)
    asked = asyncio.ensure_future(world.coordinator.attendance.whole(60.0))
    await asyncio.sleep(1)
    assert not asked.done()
    world.add_engine("a", 1, 2)
    assert (await asked).name == "a"
    world.add_replica("b")
    assert (await world.coordinator.attendance.whole(5.0)).name == "a"
    world.add_replica("c", manifest=Manifest([structs.replace(spec, name=f"other.{spec.name}") for spec in MANIFEST]))
    with pytest.raises(ManifestMismatch, match="replica c, unlike replica a, does not hold"):
        await world.coordinator.attendance.whole(5.0)
