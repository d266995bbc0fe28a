"""A replica that read from another replica commits only what has the digests of the trainer's memory under a fresh key."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.fakes import World
from tests.unit.coordinator.test_sources import MOVE, last, served, sources, waves
from tests.virtual_time import virtual

from weightsync.coordinator.keyed_digests import KEPT
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.errors import StaleSource


def keys(world: World) -> dict[bytes, list[str]]:
    """The members that had each key."""
    members: dict[bytes, list[str]] = {}
    for member, key in world.keys:
        if key:
            members.setdefault(key, []).append(member)
    return members


@virtual
async def test_a_source_that_forges_the_public_digest_poisons_nobody_in_waves() -> None:
    world = waves(4, 1)
    first = next(iter(world.serving))
    world.forging = (f"{first}/0",)
    result = await world.publish(1, timeout=500.0)
    assert result.ok
    fed = sources(result)
    assert first not in fed.values()
    assert set(world.states().values()) == {("loaded", 1)}
    world.check()
    assert [entry for entry in world.log if entry[2] == "quarantine"], "a reader noticed"


@virtual
async def test_a_source_that_forges_the_public_digest_seeds_nobody() -> None:
    world = await served("a", serving=("a",))
    world.forging = ("a/0",)
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("dirty", None)
    assert "differ from the published ones" in str(world.state("new").error)
    world.add_replica("newer")
    await world.drain()
    assert world.states()["newer"] == ("registered", None), "nobody reads from it again"
    world.check()


@pytest.mark.parametrize("ranks", [1, 2])
@virtual
async def test_every_reader_gets_another_key_and_sources_get_none(ranks: int) -> None:
    world = await served("a", "b", serving=("a",), ranks=ranks)
    for name in ("c", "d"):
        world.add_replica(name, ranks)
    await world.drain()
    assert {world.states()[name] for name in "cd"} == {("loaded", 1)}
    held = keys(world)
    trainers = ["trainer/0", "trainer/1"]
    readers = [sorted(set(members) - set(trainers)) for members in held.values()]
    assert sorted(filter(None, readers)) == [[f"{name}/{rank}" for rank in range(ranks)] for name in "cd"]
    assert len(held) == KEPT
    assert all(members[:2] == trainers and len(key) >= 16 for key, members in held.items())


@virtual
async def test_readers_of_the_trainer_need_no_key() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("a")
    assert (await world.publish(1)).ok
    world.add_replica("new", 2)
    await world.drain()
    assert world.states()["new"] == ("loaded", 1)
    assert not keys(world)


@virtual
async def test_without_the_trainer_as_many_are_seeded_as_digests_were_kept() -> None:
    world = await served("a", serving=("a",))
    for number in range(KEPT):
        world.add_replica(f"r{number}")
        await world.drain()
        assert world.states()[f"r{number}"] == ("loaded", 1)
    world.add_replica("late")
    await world.drain()
    assert world.states()["late"] == ("registered", None)
    assert "are used up" in str(world.state("late").error)
    assert not [entry for entry in world.log if entry[1:] == ("late/0", "pause")]
    world.add_trainers(2, published=1)
    assert (await world.publish(2)).ok
    assert world.states()["late"] == ("loaded", 2)
    world.check()


@virtual
async def test_the_trainer_is_asked_as_long_as_it_holds_the_version() -> None:
    world = waves(2 * KEPT, 1)
    assert (await world.publish(1, timeout=500.0)).ok
    readers = [members for members in keys(world).values() if any(not member.startswith("trainer") for member in members)]
    assert len(readers) > KEPT


@pytest.mark.parametrize("kind", ["hang", "fail"])
@virtual
async def test_in_waves_the_trainer_feeds_those_that_cannot_be_compared(kind: str) -> None:
    world = waves(3, 1)

    class Always(dict[tuple[str, str], str]):
        def pop(self, key: tuple[str, str], default: object = None) -> str | None:  # type: ignore[override]
            return self.get(key)

    world.faults = Always({("trainer/0", "digest"): kind})
    result = await world.publish(1, timeout=200.0)
    assert result.ok
    assert set(sources(result).values()) == {"trainer"}
    assert not [entry for entry in world.log if entry[2] == "quarantine"]
    world.check()


@virtual
async def test_a_replica_serves_on_while_the_trainer_digests() -> None:
    world = waves(3, 1)
    assert (await world.publish(1, timeout=500.0)).ok
    world.delays["trainer/0", "digest"] = 3 * MOVE
    publishing = world.coordinator._spawn(world.publish(2, timeout=500.0))
    await world.drain(2.5 * MOVE)
    assert sorted(world.states().values()) == [("loaded", 1), ("loaded", 2), ("loaded", 2)]
    assert (await publishing).ok
    world.check()


@virtual
async def test_what_was_kept_of_an_earlier_version_admits_nobody() -> None:
    world = await served("a", "b", serving=("a",))
    reserve = world.coordinator._keyed
    assert len(reserve._kept) == KEPT
    world.add_trainers(2, published=1)
    world.faults["trainer/0", "digest"] = "fail"
    assert (await world.publish(2)).ok
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("registered", None)
    with pytest.raises(StaleSource):
        await reserve.draw(last(world).version, RoundDeadline(10.0), "late")
