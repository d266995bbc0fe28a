"""Holds that joins, publications, re-seeding and restarts do what the coordinator promises, or say what is wrong."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST, SPECS
from tests.unit.coordinator.fakes import GRACE, FakeEngine, FakeTrainer, World, world_of
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator.events import ReplicaBytes, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.coordinator.ranks import known_as
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    DeadlineExceeded,
    ManifestMismatch,
    MembershipError,
    StaleSource,
    VersionError,
)
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.protocol.messages import Publish

OTHER = Manifest([*SPECS[:2], TensorSpec("c", (2, 4), "uint8"), TensorSpec("d", (1,), "uint8")])


@virtual
async def test_strangers_and_doubles() -> None:
    world = world_of(2, r=2)
    with pytest.raises(MembershipError, match="not a trainer rank"):
        await world.coordinator.publish("r/0", Publish(1), 10.0)
    with pytest.raises(MembershipError, match="still alive"):
        world.add_trainer(0, 2)
    with pytest.raises(MembershipError, match="still alive"):
        world.add_engine("r", 1, 2)
    with pytest.raises(MembershipError, match="3 ranks"):
        world.add_engine("r", 2, 3)
    world.trainers["trainer/1"].disconnect()
    with pytest.raises(MembershipError, match="second trainer"):
        world.add_trainer(1, 4)
    with pytest.raises(MembershipError, match="no replica is called"):
        await world.coordinator.seed(["nobody"])


@virtual
async def test_manifests_that_differ() -> None:
    world = World()
    world.add_trainer(0, 2)
    with pytest.raises(ManifestMismatch, match="trainer/1, unlike trainer/0"):
        world.add_trainer(1, 2, OTHER)
    world.add_engine("r", 0, 2, manifest=OTHER)
    with pytest.raises(ManifestMismatch, match=r"(?s)unlike the other ranks.*2 differences.*missing: d.*shape of c"):
        world.add_engine("r", 1, 2, manifest=MANIFEST)


@virtual
async def test_a_replica_with_other_tensors_is_not_seeded() -> None:
    world = World()
    world.add_replica("odd", manifest=OTHER)
    world.add_replica("even")
    world.add_trainers(1)
    assert "ManifestMismatch" in (world.state("odd").error or "")
    await world.publish(1)
    with pytest.raises(MembershipError, match="cannot be updated"):
        await world.coordinator.seed(["odd"])
    assert world.states() == {"odd": ("refused", None), "even": ("loaded", 1)}


@virtual
async def test_a_joiner_is_seeded_while_the_others_serve_on() -> None:
    world = world_of(2, old=2)
    await world.publish(1)
    world.log.clear()
    world.add_engine("new", 0, 2)
    await world.drain()
    assert world.states()["new"] == ("registered", None), "half a replica is none"
    world.add_engine("new", 1, 2)
    await world.drain()
    assert world.states() == {"old": ("loaded", 1), "new": ("loaded", 1)}
    assert {member for _, member, _ in world.log} == {"new/0", "new/1"}
    assert len(world.coordinator.status().rounds) == 2
    world.check()


@virtual
async def test_a_joiner_in_the_middle_of_a_round_is_seeded_after_it() -> None:
    world = world_of(2, old=1)
    world.delays["old/0", "move"] = 20.0
    asking = asyncio.ensure_future(world.publish(1))
    await asyncio.sleep(10.0)
    world.add_replica("new")
    assert (await asking).ok
    await world.drain()
    assert world.states() == {"old": ("loaded", 1), "new": ("loaded", 1)}
    world.check()


@virtual
async def test_a_dirty_replica_is_reseeded_on_request_and_on_reconnect_but_not_in_a_loop() -> None:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, retry=False))
    world.add_trainers(2)
    world.add_replica("r", ranks=2)
    world.add_replica("s")
    world.faults["r/1", "move"] = "corrupt"
    await world.publish(1)
    rounds = len(world.coordinator.status().rounds)
    await world.drain()
    assert len(world.coordinator.status().rounds) == rounds, "nobody asked"
    result = await world.coordinator.seed()
    assert [replica.name for replica in result.replicas] == ["r"]
    assert world.states()["r"] == ("loaded", 1)
    with pytest.raises(MembershipError, match="nothing to update"):
        await world.coordinator.seed()
    world.faults["r/0", "commit"] = "fail"
    await world.publish(2)
    assert world.states()["r"] == ("dirty", None)
    process = world.engines["r/1"]
    process.disconnect()
    assert world.states()["r"] == ("lost", None)
    world.faults["r/0", "pause"] = "fail"  # the one attempt fails
    process.connect()
    await world.drain()
    assert world.states()["r"] == ("dirty", None)
    assert not world.faults
    process.disconnect()
    process.connect()
    await world.drain()
    assert world.states()["r"] == ("loaded", 2)
    world.check()


@virtual
async def test_seeding_needs_the_very_processes_that_placed() -> None:
    world = world_of(2, r=1)
    await world.publish(1)
    process = world.trainers["trainer/1"]
    process.disconnect()
    world.add_replica("late")
    await world.drain()
    assert world.states()["late"] == ("registered", None)
    with pytest.raises(StaleSource):
        await world.coordinator.seed(["late"])
    process.connect()  # the same process: its region is still there
    await world.drain()
    assert world.states()["late"] == ("loaded", 1)
    process.disconnect()
    world.add_trainer(1, 2)  # another process: an empty region
    with pytest.raises(StaleSource):
        await world.coordinator.seed(["r"])
    assert (await world.publish(2)).ok
    world.check()


@virtual
async def test_a_publication_cancels_a_reseeding_and_takes_its_replica_along() -> None:
    world = world_of(2, r=1)
    await world.publish(1)
    world.delays["new/0", "move"] = 100.0
    world.add_replica("new")
    await asyncio.sleep(10.0)
    assert world.states()["new"] == ("updating", None)
    asked = asyncio.ensure_future(world.coordinator.seed(["r"]))  # waits for its turn, which does not come
    await asyncio.sleep(0.1)
    world.delays.clear()
    started = asyncio.get_running_loop().time()
    assert (await world.publish(2)).ok
    assert asyncio.get_running_loop().time() - started < 1.0
    assert world.states() == {"r": ("loaded", 2), "new": ("loaded", 2)}
    await asyncio.wait([asked], timeout=1)
    assert asked.done()
    assert isinstance(asked.exception(), (Aborted, type(None)))
    world.check()


@virtual
async def test_a_reseeding_that_was_cancelled_for_a_publication_that_placed_nothing_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(*_: object) -> None:
        raise DeadlineExceeded("no time to look at the layouts")

    world = world_of(2, r=1)
    await world.publish(1)
    world.delays["new/0", "move"] = 100.0
    world.add_replica("new")
    await asyncio.sleep(10.0)
    del world.delays["new/0", "move"]
    with monkeypatch.context() as patched, pytest.raises(DeadlineExceeded, match="no time to look"):
        patched.setattr(world.coordinator._planner, "cover", late)
        await world.publish(2)
    await world.drain()
    assert world.states() == {"r": ("loaded", 1), "new": ("loaded", 1)}
    world.check()


@virtual
async def test_a_reseeding_that_was_cancelled_for_a_publication_that_never_ran_is_begun_again() -> None:
    world = world_of(2, r=1)
    await world.publish(1)
    world.delays |= {("new/0", "move"): 100.0, ("new/0", "quarantine"): 3.0}
    world.add_replica("new")
    await asyncio.sleep(10.0)
    assert world.states()["new"] == ("updating", None)
    del world.delays["new/0", "move"]
    with pytest.raises(DeadlineExceeded, match="waiting for the running round"):
        await world.publish(2, 1.0)
    await world.drain()
    assert world.states() == {"r": ("loaded", 1), "new": ("loaded", 1)}
    world.check()


@virtual
async def test_a_restarted_rank_replaces_the_one_that_is_gone() -> None:
    world = world_of(1, r=2)
    await world.publish(1)
    world.engines["r/1"].disconnect()
    assert world.states()["r"] == ("lost", None)
    world.add_engine("r", 1, 2)  # scrambled, next to a rank that holds version 1
    assert world.states()["r"] == ("dirty", None), "half of it was never seeded"
    await world.drain()
    assert world.states()["r"] == ("loaded", 1)
    world.check()


@virtual
async def test_a_connection_that_blinks_costs_nothing() -> None:
    world = world_of(1, r=2)
    await world.publish(1)
    world.log.clear()
    old = world.engines["r/1"].node
    world.engines["r/1"].connect()  # before anybody noticed that the old connection is dead
    world.coordinator.leave(old)  # which is noticed now, and does no harm
    await world.drain()
    assert world.states()["r"] == ("loaded", 1)
    assert not world.log
    world.check()


@virtual
async def test_a_plan_is_made_once_until_somebody_comes_or_fails() -> None:
    world = world_of(2, r=2, s=1)

    async def prepared(number: int) -> set[str]:
        world.log.clear()
        await world.publish(number)
        return {member for _, member, phase in world.log if phase == "prepare"}

    assert await prepared(1) == {"r/0", "r/1", "s/0"}
    before = dict(world.coordinator._planner.agreed)
    assert await prepared(2) == set()
    assert world.coordinator._planner.agreed == before
    world.faults["s/0", "move"] = "fail"
    await prepared(3)
    assert await prepared(4) == {"s/0"}, "after a failure its connections are made anew"
    world.trainers["trainer/1"].disconnect()
    world.add_trainer(1, 2)
    assert await prepared(5) == {"r/0", "r/1", "s/0"}, "another process, other addresses"
    assert world.coordinator._planner.agreed["r"] is not before["r"]
    world.engines["r/0"].disconnect()
    world.add_engine("r", 0, 2)
    await world.drain()
    assert await prepared(6) == set(), "the joiner's seeding prepared it"
    assert world.coordinator._planner.agreed["s"].key != before["s"].key
    world.check()


def restart(world: World) -> None:
    """The coordinator dies; a new one gets everybody's hello."""
    fresh = World(world.settings)
    world.coordinator = fresh.coordinator
    for engine in world.engines.values():
        engine.connect()
    for trainer in list(world.trainers.values()):
        trainer.connect()


@virtual
async def test_a_restarted_coordinator_believes_what_is_consistent() -> None:
    world = world_of(2, r=2, s=1)
    await world.publish(5)
    world.log.clear()
    restart(world)
    await world.drain()
    assert world.states() == {"r": ("loaded", 5), "s": ("loaded", 5)}
    assert {called for _, _, called in world.log} == {"prepare"}, "nobody was paused"
    assert world.coordinator.status().last == 5
    with pytest.raises(VersionError, match="last one is 5"):
        await world.publish(5)
    assert (await world.publish(6)).ok
    world.check()


@virtual
async def test_a_restarted_coordinator_excludes_ranks_that_differ() -> None:
    world = world_of(2, r=2)
    await world.publish(5)
    world.engines["r/1"].label = None
    restart(world)
    assert world.states() == {"r": ("dirty", None)}
    await world.drain()
    assert not any(rank.generating for rank in world.replica("r"))
    assert (await world.publish(6)).ok
    world.check()


@virtual
async def test_a_publication_lets_a_quarantine_end_before_it_prepares() -> None:
    """Seen in a soak: a rank that came back was excluded and, in the same moment, prepared; the one aborted the other."""
    world = world_of(2, r=2)
    await world.publish(5)
    world.engines["r/1"].label = None
    restart(world)
    world.delays["r/1", "before quarantine"] = 0.005  # preparing takes 0.01
    assert (await world.publish(6)).ok
    world.check()


def forge(world: World, name: str, number: int) -> None:
    """Let a replica claim a version with a digest that nobody published."""
    world.engines[f"{name}/0"].label = Version("test", number, MANIFEST.fingerprint, "0123456789abcdef")


@virtual
@pytest.mark.parametrize("liar", ["a", "r"])
async def test_a_claim_of_another_digest_takes_nobody_else_out_of_service(liar: str) -> None:
    """After a restart the coordinator learns from the trainer which digest was published, whoever comes first."""
    world = world_of(1)
    for name in ("a", "b", "r"):
        world.add_replica(name)
    await world.publish(5)
    forge(world, liar, 5)
    world.log.clear()
    restart(world)
    honest = {"a", "b", "r"} - {liar}
    assert {name: state for name, state in world.states().items() if name in honest} == dict.fromkeys(honest, ("loaded", 5))
    await world.drain()
    assert world.states()[liar] == ("dirty", None)
    assert {member for _, member, called in world.log if called != "prepare"} == {f"{liar}/0"}, "an honest replica was touched"
    assert (await world.publish(6)).ok
    world.check()


@virtual
async def test_replicas_that_differ_are_neither_believed_nor_paused_until_the_trainer_says_who_is_right() -> None:
    world = world_of(1)
    for name in ("r", "s", "t"):
        world.add_replica(name)
    await world.publish(5)
    forge(world, "s", 5)
    world.trainers["trainer/0"].disconnect()
    restart(world)
    await world.drain()
    assert world.states() == dict.fromkeys(("r", "s", "t"), ("registered", None))
    assert all(engine.generating for engine in world.engines.values())
    assert "the trainer has not confirmed any" in str(world.state("r").error)
    world.add_trainer(0, 1)  # a process that was started anew, and knows no digest
    await world.drain()
    assert world.states() == dict.fromkeys(("r", "s", "t"), ("registered", None))
    assert (await world.publish(6)).ok
    assert world.states() == dict.fromkeys(("r", "s", "t"), ("loaded", 6))
    world.check()


@virtual
async def test_a_digest_that_the_trainer_reports_for_another_run_or_model_counts_for_nothing() -> None:
    world = world_of(1, r=1)
    await world.publish(5)
    for version in (Version("other", 5, MANIFEST.fingerprint, "0123456789abcdef"), Version("test", 5, "other", "0123456789abcdef")):
        world.trainers["trainer/0"].last = version
        restart(world)
        assert world.states() == {"r": ("loaded", 5)}


# Who may take whose place.


@virtual
@pytest.mark.parametrize("kind", ["trainer", "engine"])
async def test_a_connected_rank_gives_way_only_to_its_own_credential(kind: str) -> None:
    world = world_of(1, r=1)
    await world.publish(1)
    real: Any = world.trainers["trainer/0"] if kind == "trainer" else world.engines["r/0"]
    old, rank = real.node, real.node.rank
    join: Any = world.coordinator.join_trainer if kind == "trainer" else world.coordinator.join_engine
    for credential in ("", "guessed", real.credential[:-1], real.credential + "x", "\u1234"):
        thief: Any = FakeTrainer(real) if kind == "trainer" else FakeEngine(real)
        hello = structs.replace(rank.hello, credential=known_as(credential))  # with the session of the real one, at that
        thief.rank = replace(rank, hello=hello)
        with pytest.raises(MembershipError, match="only that process may reconnect"):
            join(thief)
        assert not old.dismissed
    credential = real.credential
    real.connect()  # the coordinator has not seen the old connection end
    assert len(old.dismissed) == 1
    assert "connected again" in old.dismissed[0]
    assert real.credential == credential
    real.disconnect()
    real.connect()  # it has seen it now
    assert real.credential not in ("", credential), "the old one is worth nothing any more"
    assert (await world.publish(2)).ok
    world.check()


@virtual
async def test_a_rank_whose_welcome_was_lost_needs_no_credential() -> None:
    world = World()
    process = world.add_engine("r", 0, 1)
    (link,) = world.coordinator._members.replicas["r"].links.values()
    link.confirmed, process.credential = False, ""
    with pytest.raises(MembershipError, match="still alive"):
        world.add_engine("r", 0, 1)  # another process
    process.connect()
    assert process.credential == link.credential


@pytest.mark.parametrize("before", [0, 1])
@virtual
async def test_a_rank_that_never_got_its_last_welcome_is_revoked_too(before: int) -> None:
    world = World()
    world.add_replica("r")
    process = world.engines["r/0"]
    if before:
        process.disconnect()
    shown = process.credential if before else ""
    process.connect() if before else None
    process.credential = shown  # the Welcome with the new one was lost
    world.coordinator.revoke("r/0")
    with pytest.raises(AuthenticationError, match="revoked: restart its process"):
        process.connect()
    world.add_engine("r", 0, 1)


@virtual
async def test_a_revoked_rank_is_sent_away_and_its_place_is_free() -> None:
    world = world_of(1, r=1)
    await world.publish(1)
    process = world.engines["r/0"]
    assert world.coordinator.revoke("r/0").member == "r/0"
    assert process.node.dismissed == ["its credential was revoked"]
    assert world.states()["r"] == ("left", None)
    with pytest.raises(AuthenticationError, match="revoked: restart its process"):
        process.connect()
    with pytest.raises(MembershipError, match=r"'r/0' is not connected; these ranks are: trainer/0"):
        world.coordinator.revoke("r/0")
    world.add_engine("r", 0, 1)
    await world.drain()
    assert world.states()["r"] == ("loaded", 1)


@virtual
async def test_a_version_of_another_run_counts_for_nothing() -> None:
    world = World()
    process = world.add_engine("r", 0, 1)
    process.disconnect()
    process.label = Version("before", 50, MANIFEST.fingerprint, "0123456789abcdef")
    process.connect()
    assert world.states() == {"r": ("registered", None)}
    assert world.coordinator.status().last == -1


@virtual
async def test_a_replica_of_one_rank_is_reported_in_the_same_phases() -> None:
    """Whoever sends requests holds them back from "pause" on, and does not ask how many messages a round has."""
    world = world_of(1, r=1)
    seen: list[object] = []
    async with aclosing(world.coordinator.subscribe()) as events:  # type: ignore[type-var]
        watching = asyncio.ensure_future(_collect(events, seen))
        await world.publish(1)
        world.delays["r/0", "pause"] = 5.0
        publishing = asyncio.ensure_future(world.publish(2))
        await asyncio.sleep(1.0)
        assert [event.phase for event in seen if isinstance(event, ReplicaPhase) and event.round == 2] == ["agree", "pause", "move"]
        await publishing
        await world.coordinator.aclose()
        await asyncio.wait_for(watching, 1)
    for number in (1, 2):
        phases = [event.phase for event in seen if isinstance(event, ReplicaPhase) and event.round == number]
        assert phases == ["agree", "pause", "move", "verify", "commit"]


@virtual
async def test_status_and_events() -> None:
    world = world_of(2, r=2)
    seen: list[object] = []
    async with aclosing(world.coordinator.subscribe()) as events:  # type: ignore[type-var]
        watching = asyncio.ensure_future(_collect(events, seen))
        await world.publish(1)
        await world.publish(3)
        world.faults["r/0", "prepare"] = "fail"
        for link in world.coordinator._members.replicas["r"].links.values():
            link.prepared = None
        await world.publish(9)
        await world.coordinator.aclose()
        await asyncio.wait_for(watching, 1)
    assert [event.number for event in seen if isinstance(event, RoundStarted)] == [1, 3, 9]
    first = [event.phase for event in seen if isinstance(event, ReplicaPhase) and event.round == 1]
    assert first == ["agree", "pause", "move", "verify", "commit"]
    moved = [event for event in seen if isinstance(event, ReplicaBytes)]
    assert moved[1] == ReplicaBytes("r", MANIFEST.nbytes, MANIFEST.nbytes)
    assert sum(isinstance(event, RoundEnded) for event in seen) == 3
    status = world.coordinator.status()
    assert status.version is not None
    assert (status.last, status.version.number, len(status.rounds)) == (9, 9, 3)
    assert world.state("r").staleness == 1
    assert [rank.member for rank in status.trainer] == ["trainer/0", "trainer/1"]
    with pytest.raises(Aborted):
        await world.publish(10)
    with pytest.raises(Aborted):
        world.add_replica("s")


async def _collect(events: object, seen: list[object]) -> None:
    async for event in events:  # type: ignore[attr-defined]
        seen.append(event)


@virtual
async def test_a_subscriber_that_sleeps_costs_nothing() -> None:
    world = world_of(1, r=1)
    events = world.coordinator.subscribe()
    for number in range(200):
        await world.publish(number)
    await world.coordinator.aclose()
    seen: list[object] = []
    await _collect(events, seen)
    assert len(seen) == 1024
    last = seen[-1]
    assert isinstance(last, RoundEnded)


@virtual
async def test_aclose_leaves_no_task() -> None:
    world = world_of(2, r=1)
    world.faults["r/0", "move"] = "hang"
    asking = asyncio.ensure_future(world.coordinator.publish("trainer/0", Publish(1), 600.0))
    other = asyncio.ensure_future(world.coordinator.publish("trainer/1", Publish(1), 600.0))
    await asyncio.sleep(5)
    await world.coordinator.aclose()
    await world.coordinator.aclose()
    await asyncio.wait([asking, other], timeout=1)
    await asyncio.sleep(GRACE)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert isinstance(asking.exception(), Aborted)
    assert isinstance(other.exception(), Aborted)
    world.check()


@virtual
async def test_a_replica_prepares_while_training_goes_on() -> None:
    world = World()
    world.add_replica("early", ranks=2)
    await world.drain(1)
    assert not world.log, "there is nothing to plan before the whole trainer is there"
    world.add_trainers(2)
    await world.drain(1)
    assert [(member, called) for _, member, called in world.log] == [("early/0", "prepare"), ("early/1", "prepare")]
    world.log.clear()
    assert (await world.publish(1)).ok
    assert "prepare" not in {called for _, _, called in world.log}
    world.log.clear()
    world.add_replica("late")
    await world.drain(1)
    assert [called for _, member, called in world.log if member == "late/0"].count("prepare") == 1, "seeding prepares it"
    world.check()


@virtual
async def test_a_round_waits_for_what_prepares_ahead_of_it() -> None:
    world = World()
    world.add_replica("r")
    world.delays["r/0", "prepare"] = 5.0
    world.add_trainers(2)
    await world.drain(1)
    result = await world.publish(1)
    assert result.ok, result
    assert [called for _, _, called in world.log].count("prepare") == 1
    world.check()
