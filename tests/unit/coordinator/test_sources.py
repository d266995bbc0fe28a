"""Replicas that serve their weights feed others: joiners without a trainer, and replicas of a publication in waves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.unit.coordinator.contents import MANIFEST, STREAMED, row_digests, rows_layout
from tests.unit.coordinator.fakes import GRACE, EngineProcess, TrainerProcess, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.errors import StaleSource
from weightsync.model import Manifest, Version, fold
from weightsync.protocol.messages import RoundResult

MOVE = 10.0


def sources(result: RoundResult) -> dict[str, str]:
    return {replica.name: replica.source for replica in result.replicas}


async def served(*replicas: str, serving: tuple[str, ...] = ("a",), ranks: int = 1, live: bool = False) -> World:
    """Version 1 is published, and the trainer is gone."""
    world = World(live=live, serving=serving)
    world.add_trainers(2)
    for name in replicas or ("a",):
        world.add_replica(name, ranks)
    assert (await world.publish(1)).ok
    for trainer in list(world.trainers.values()):
        trainer.disconnect()
    return world


def last(world: World) -> RoundResult:
    return world.coordinator.status().rounds[-1]


@pytest.mark.parametrize("ranks", [1, 2])
@virtual
async def test_a_joiner_is_seeded_by_a_replica_when_the_trainer_is_gone(ranks: int) -> None:
    world = await served(ranks=ranks)
    world.add_replica("new", 3 - ranks)
    await world.drain()
    assert world.states() == {"a": ("loaded", 1), "new": ("loaded", 1)}
    assert sources(last(world)) == {"new": "a"}
    assert not [entry for entry in world.log if entry[1].startswith("a/") and entry[2] == "pause" and entry[0] > MOVE]
    world.check()


@virtual
async def test_a_joiner_is_seeded_when_the_trainers_own_memory_has_changed() -> None:
    world = World(live=True, serving=("a",))
    world.add_trainers(2)
    world.add_replica("a", 2)
    assert (await world.publish(1)).ok
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("loaded", 1)
    assert sources(last(world)) == {"new": "a"}
    world.check()


@virtual
async def test_the_trainer_feeds_a_joiner_while_it_can_be_read() -> None:
    world = World(serving=("a",))
    world.add_trainers(2)
    world.add_replica("a")
    assert (await world.publish(1)).ok
    world.add_replica("new")
    await world.drain()
    assert sources(last(world)) == {"new": "trainer"}


@virtual
async def test_a_replica_that_does_not_serve_its_weights_feeds_nobody() -> None:
    world = await served(serving=())
    world.add_replica("new")
    await world.drain()
    assert world.states()["new"] == ("registered", None)
    with pytest.raises(StaleSource, match="no trainer is connected"):
        await world.coordinator.seed(["new"])


@virtual
async def test_a_replica_that_is_not_serving_is_no_source() -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.coordinator._exclude(world.coordinator._members.replicas["a"], "a test says so")
    world.add_replica("new")
    await world.drain()
    assert sources(last(world)) == {"new": "b"}
    assert world.states()["new"] == ("loaded", 1)
    world.check()


@virtual
async def test_a_replica_with_an_older_version_is_no_source() -> None:
    world = World(serving=("late",), live=True)
    world.add_trainers(1)
    world.add_replica("late")
    world.add_replica("b")
    assert (await world.publish(1)).ok
    (late,) = world.replica("late")
    late.disconnect()
    await world.publish(2)
    late.connect()
    world.add_replica("new")
    await world.drain()
    assert world.states()["late"] == ("loaded", 1)
    assert world.states()["new"] == ("registered", None)
    world.check()


@virtual
async def test_a_replica_that_does_not_hold_the_bytes_of_its_label_is_taken_out_of_service() -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.faults["a/0", "place"] = "corrupt"
    world.delays["a/0", "pause"] = MOVE  # before it is seeded again
    world.add_replica("new")
    await world.drain(MOVE / 2)
    assert world.states() == {"a": ("updating", None), "b": ("loaded", 1), "new": ("loaded", 1)}
    assert [entry[1] for entry in world.log if entry[2] == "quarantine"] == ["a/0"]
    assert not world.engines["a/0"].generating
    await world.drain()
    assert world.states() == {"a": ("loaded", 1), "b": ("loaded", 1), "new": ("loaded", 1)}
    assert sources(last(world)) == {"a": "b"}
    world.check()


@virtual
async def test_one_whose_label_was_refuted_waits_out_of_service_where_nothing_can_be_read() -> None:
    world = await served("a", "b", serving=("a",))
    world.faults["a/0", "place"] = "corrupt"
    world.add_replica("new")
    await world.drain()
    assert world.states() == {"a": ("dirty", None), "b": ("loaded", 1), "new": ("registered", None)}
    assert "does not hold the bytes of version test@1" in str(world.state("a").error)
    assert not world.engines["a/0"].generating
    world.check()


@virtual
async def test_in_waves_the_trainer_seeds_a_source_again_that_does_not_hold_its_version() -> None:
    world = waves(3, 1, serving=1)
    source = next(iter(world.serving))
    world.faults[f"{source}/0", "place"] = "corrupt"
    result = await world.publish(1, timeout=500.0)
    assert result.ok
    assert set(sources(result).values()) == {"trainer"}
    await world.drain()
    assert set(world.states().values()) == {("loaded", 1)}
    assert sources(last(world)) == {source: "trainer"}
    world.check()


@pytest.mark.parametrize("kind", ["fail", "hang", "lost", "stubborn"])
@virtual
async def test_another_source_is_asked_if_the_first_cannot_place(kind: str) -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.faults["a/0", "place"] = kind
    world.add_replica("new")
    await world.drain(1500.0)
    assert world.states()["new"] == ("loaded", 1)
    assert sources(last(world)) == {"new": "b"}
    world.check()


@pytest.mark.parametrize("event", ["killed", "quarantined"])
@virtual
async def test_a_reader_whose_source_ends_in_the_middle_serves_nothing_until_it_is_seeded(event: str) -> None:
    world = await served("a", "b", serving=("a", "b"))
    world.add_replica("new")
    world.delays["new/0", "move"] = MOVE
    await world.drain(MOVE / 2)
    assert world.states()["new"] == ("updating", None)
    for name in "ab":  # whichever feeds it
        if event == "killed":
            world.replica(name)[0].disconnect()
        else:
            world.coordinator._exclude(world.coordinator._members.replicas[name], "a test says so")
    await world.drain()
    assert world.states()["new"] == ("dirty", None)
    assert not world.engines["new/0"].generating
    world.check()
    world.add_trainers(2, published=1)
    assert (await world.publish(2)).ok
    assert world.states()["new"] == ("loaded", 2)
    world.check()


async def restarted(*, live: bool = False) -> tuple[World, list[TrainerProcess]]:
    """Replicas a, which serves its weights, and b are at version 1. The coordinator is restarted; the trainer is not back yet."""
    world = World(serving=("a",), live=live)
    world.add_trainers(2)
    world.add_replica("a")
    world.add_replica("b")
    assert (await world.publish(1)).ok
    trainers, engines = list(world.trainers.values()), list(world.engines.values())
    again = World(serving=("a",), sessions=100, live=live)
    for process in (*trainers, *engines):
        process.world = again
    for engine in engines:
        engine.connect()
    return again, trainers


@pytest.mark.parametrize("live", [False, True])
@virtual
async def test_after_a_restart_replicas_feed_each_other_when_a_trainer_rank_reports_the_version(live: bool) -> None:
    world, trainers = await restarted(live=live)
    world.add_replica("new")
    await world.drain()
    assert world.states() == {"a": ("loaded", 1), "b": ("loaded", 1), "new": ("registered", None)}
    assert not [phase for _, _, phase in world.log if phase != "let_go"], "nobody is asked anything on a replica's word"
    for trainer in trainers:
        trainer.connect()
    await world.drain()
    # Memory that is read in place is not the version's any more, so the trainer cannot digest it under a new key.
    assert world.states() == {"a": ("loaded", 1), "b": ("loaded", 1), "new": ("registered", None) if live else ("loaded", 1)}
    assert [replica.source for replica in last(world).replicas if replica.error is None] == ([] if live else ["a"])
    world.check()


def claims(world: World, name: str, number: int) -> EngineProcess:
    """A stolen engine that serves its weights, and says that they are version ``number``."""
    world.serving += (name,)
    thief = EngineProcess(world, name, 0, 1, world.session(), "auto", MANIFEST)
    content = np.full(3, number if number > 1 else 66, np.int64)  # 1 was published
    digest = fold(row_digests(rows_layout(MANIFEST, 0, 1), content))
    thief.content, thief.label = content, Version("test", number, MANIFEST.fingerprint, digest)
    thief.connect()
    return thief


@pytest.mark.parametrize("first", ["claim", "replica"])
@virtual
async def test_a_claim_seeds_nobody_before_the_first_publication(first: str) -> None:
    world = World()
    world.add_trainers(1)
    if first == "claim":
        claims(world, "thief", 7)
    world.add_replica("honest")
    if first == "replica":
        claims(world, "thief", 7)
    await world.drain()
    assert world.states()["honest"] == ("registered", None)
    assert not [entry for entry in world.log if entry[2] in ("check", "pause", "move")]


@pytest.mark.parametrize("number", [1, 2, 9])
@virtual
async def test_a_claim_that_comes_before_the_trainer_after_a_restart_overwrites_nobody(number: int) -> None:
    world, trainers = await restarted()
    claims(world, "thief", number)
    world.add_replica("new")
    await world.drain()
    for trainer in trainers:
        trainer.connect()
    await world.drain()
    assert world.states()["b"] == ("loaded", 1)
    assert world.states()["new"] == ("loaded", 1), "the trainer says what the last version is"
    (honest,) = world.replica("b")
    assert honest.holds(1)
    assert not [entry for entry in world.log if entry[1].startswith("b/") and entry[2] == "pause"]


@virtual
async def test_replicas_feed_nobody_while_the_trainer_publishes_streams() -> None:
    world = World(windows=2, serving=("a",))
    world.add_trainers(1, manifest=Manifest(()))
    world.add_replica("a", delivery="streamed", manifest=STREAMED)
    assert (await world.publish(1)).ok
    world.add_replica("late", delivery="streamed", manifest=STREAMED)
    await world.drain()
    assert world.states() == {"a": ("loaded", 1), "late": ("registered", None)}
    assert not [entry for entry in world.log if entry[2] == "place"]
    assert (await world.publish(2)).ok
    world.check()


def waves(count: int, fan_out: int | None, serving: int | None = None, max_unavailable: int | None = None) -> World:
    settings = RoundSettings(run="test", grace=GRACE, timeout=600.0, fan_out=fan_out, max_unavailable=max_unavailable)
    world = World(settings, apart=True)
    names = [f"r{index}" for index in range(count)]
    world.serving = tuple(names[: count if serving is None else serving])
    world.add_trainers(1)
    for name in names:
        world.add_replica(name)
        world.delays[f"{name}/0", "move"] = MOVE
    return world


@pytest.mark.parametrize(("count", "fan_out", "steps"), [(8, 1, 4), (10, 1, 4), (1, 1, 1), (9, 2, 3)])
@virtual
async def test_replicas_are_fed_in_waves(count: int, fan_out: int, steps: int) -> None:
    world = waves(count, fan_out)
    result = await world.publish(1, timeout=500.0)
    assert result.ok
    fed = Counter(sources(result).values())
    assert fed["trainer"] <= fan_out + 1
    assert steps * MOVE <= result.seconds < (steps + 0.5) * MOVE
    world.check()
    result = await world.publish(2, timeout=500.0)
    assert result.ok
    assert set(world.states().values()) == {("loaded", 2)}


@virtual
async def test_without_a_limit_all_read_from_the_trainer() -> None:
    world = waves(6, None)
    result = await world.publish(1, timeout=500.0)
    assert set(sources(result).values()) == {"trainer"}
    assert result.seconds < 1.5 * MOVE


@virtual
async def test_where_no_replica_serves_its_weights_the_trainer_feeds_all_in_turns() -> None:
    world = waves(4, 2, serving=0)
    result = await world.publish(1, timeout=500.0)
    assert result.ok
    assert set(sources(result).values()) == {"trainer"}
    assert 2 * MOVE <= result.seconds < 2.5 * MOVE


@pytest.mark.parametrize("kind", ["killed", "quarantined", "place hangs", "place corrupt"])
@virtual
async def test_the_trainer_feeds_those_whose_source_fails(kind: str) -> None:
    world = waves(4, 1, serving=1)
    if kind.startswith("place"):
        world.faults["r0/0", "place"] = kind.partition(" ")[2].removesuffix("s")
    publishing = world.coordinator._spawn(world.publish(1, timeout=300.0))
    await world.drain(1.5 * MOVE)
    assert not publishing.done()
    source = next(iter(world.serving))
    if kind == "killed":
        world.replica(source)[0].disconnect()
    elif kind == "quarantined":
        world.coordinator._exclude(world.coordinator._members.replicas[source], "a test says so")
    result = await publishing
    assert {name: state for name, state in world.states().items() if name != source} == dict.fromkeys(
        ("r1", "r2", "r3"), ("loaded", 1)
    )
    assert result.seconds < 300.0
    world.check()


@virtual
async def test_a_replica_that_waits_too_long_for_a_source_serves_on() -> None:
    world = waves(3, 1, serving=0)
    for name in ("r0", "r1", "r2"):
        world.delays[f"{name}/0", "move"] = 0.01
    assert (await world.publish(1)).ok
    for name in ("r0", "r1", "r2"):
        world.delays[f"{name}/0", "move"] = 25.0
    result = await world.publish(2, timeout=40.0)
    assert Counter(world.states().values()) == {("loaded", 2): 1, ("dirty", None): 1, ("loaded", 1): 1}
    assert [replica for replica in result.replicas if "wait: DeadlineExceeded" in str(replica.error)]
    world.check()


@pytest.mark.parametrize("serving", [0, 1])
@virtual
async def test_an_error_names_the_phase_in_which_the_time_ran_out(serving: int) -> None:
    world = waves(3, 2 - serving, serving=serving, max_unavailable=1)
    assert (await world.publish(1)).ok
    world.faults[f"r{serving}/0", "move"] = "hang"
    result = await world.publish(2, timeout=40.0)
    errors = {replica.name: str(replica.error) for replica in result.replicas if replica.error is not None}
    assert errors["r2"].startswith("wait: DeadlineExceeded: waiting for its turn"), errors
    assert world.states()["r2"] == ("loaded", 1)
    world.check()


@virtual
async def test_a_version_that_the_trainer_did_not_publish_seeds_nobody() -> None:
    world = World(live=True, serving=("liar",))
    world.add_trainers(1)
    world.add_replica("a")
    assert (await world.publish(1)).ok
    version = Version("test", 9, MANIFEST.fingerprint, fold(row_digests(rows_layout(MANIFEST, 0, 1), np.full(3, 9, np.int64))))
    liar = EngineProcess(world, "liar", 0, 1, world.session(), "auto", MANIFEST)
    liar.content, liar.label = np.full(3, 9, np.int64), version
    liar.connect()
    (honest,) = world.replica("a")
    honest.disconnect()
    honest.connect()
    world.add_replica("new")
    await world.drain()
    assert world.states()["a"] == ("loaded", 1)
    assert world.states()["new"] == ("registered", None)
    assert honest.holds(1)


@pytest.mark.parametrize("kind", ["hang", "stubborn"])
@pytest.mark.parametrize("phase", ["prepare", "move"])
@virtual
async def test_a_replica_that_hangs_does_not_keep_the_others_from_a_source(kind: str, phase: str) -> None:
    world = waves(6, 1)
    world.faults["r0/0", phase] = kind
    result = await world.publish(1, timeout=200.0)
    assert {name: state for name, state in world.states().items() if name != "r0"} == dict.fromkeys(
        ("r1", "r2", "r3", "r4", "r5"), ("loaded", 1)
    )
    assert [replica.name for replica in result.replicas if replica.error is not None] == ["r0"]
    world.check()
