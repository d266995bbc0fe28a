"""A replica whose readers held other bytes than its version's is not read again until it has verified a version anew."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.test_sources import MOVE, last, served, sources, waves
from tests.virtual_time import virtual

from weightsync.errors import StaleSource


class Always(dict[tuple[str, str], str]):
    """Faults that come every time."""

    def pop(self, key: tuple[str, str], default: object = None) -> str | None:  # type: ignore[override]
        return self.get(key)


@virtual
async def test_it_is_not_offered_in_the_next_round() -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.faults["new/0", "move"] = "corrupt"
    world.add_replica("new")
    await world.drain()
    assert sources(last(world)) == {"new": "b"}, "in the same round"
    world.add_replica("newer")
    await world.drain()
    assert sources(last(world)) == {"newer": "b"}
    assert not [entry for entry in world.log if entry[1:] == ("newer/0", "quarantine")]
    assert world.states()["newer"] == ("loaded", 1)
    world.check()


@virtual
async def test_the_only_source_feeds_nobody_until_it_has_verified_another_version() -> None:
    world = await served("a")
    world.faults["new/0", "move"] = "corrupt"
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("dirty", None)
    world.add_replica("newer")
    await world.drain()
    assert world.states()["newer"] == ("registered", None), "it was not paused"
    with pytest.raises(StaleSource):
        await world.coordinator.seed(["newer"])
    world.add_trainers(2, published=1)
    assert (await world.publish(2)).ok
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
    world.add_replica("newest")
    await world.drain()
    assert sources(last(world))["newest"] == "a"
    assert world.states()["newest"] == ("loaded", 2)
    world.check()


@virtual
async def test_a_reader_that_fails_from_two_sources_blames_neither() -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.faults = Always({("broken/0", "move"): "corrupt"})
    world.add_replica("broken")
    await world.drain()
    assert world.states()["broken"] == ("dirty", None)
    world.add_replica("new")
    await world.drain()
    assert sources(last(world)) == {"new": "a"}
    assert world.states()["new"] == ("loaded", 1), "the reader that failed took all keyed digests"
    world.check()


@virtual
async def test_in_waves_the_trainer_feeds_the_next_reader() -> None:
    world = waves(3, 1, serving=1)
    source = next(iter(world.serving))
    reader = next(name for name in ("r0", "r1", "r2") if name != source)
    world.faults[f"{reader}/0", "move"] = "corrupt"
    result = await world.publish(1, timeout=500.0)
    assert result.ok
    fed = sources(result)
    assert [name for name in fed.values() if name == source] in ([], [source])
    assert result.seconds < 5 * MOVE
    world.check()
