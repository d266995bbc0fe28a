"""Holds that one replica's trouble stays its own, in every phase and of every kind, and that nothing torn is ever served."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.errors import ConfigurationError, DeadlineExceeded, LoadError, PeerLost, ProtocolError, WeightSyncError
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.messages import Delivery, Publish

PHASES = ("prepare", "pause", "move", "commit", "resume")
KINDS = ("fail", "crash", "hang", "stubborn", "lost", "vanish")


def fleet(settings: RoundSettings | None = None, delivery: Delivery = "auto") -> World:
    world = World(settings) if settings else World()
    world.add_trainers(2)
    world.add_replica("sick", ranks=2, delivery=delivery)
    world.add_replica("well", ranks=2, delivery=delivery)
    world.add_replica("fine", ranks=1, delivery=delivery)
    return world


@virtual
async def test_everybody_gets_the_version() -> None:
    world = fleet()
    result = await world.publish(4)
    assert result.ok, result.error
    assert world.states() == {"sick": ("loaded", 4), "well": ("loaded", 4), "fine": ("loaded", 4)}
    assert result.nbytes == 3 * MANIFEST.nbytes
    assert {replica.delivery for replica in result.replicas} == {"direct"}
    for replica in result.replicas:
        assert list(replica.phases) == ["agree", "pause", "move", "verify", "commit"]
        assert replica.digest == result.version.digest
        assert replica.verified == "installed"
        assert replica.paused_seconds == pytest.approx(0.04)
    assert result.phases["place"] == pytest.approx(0.01)
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_each_placing_has_a_number_of_its_own_that_trainer_ranks_share() -> None:
    """By it they know which of them take maxima together, also if a version that failed is published again."""
    world = fleet()
    await world.publish(1)
    world.faults["trainer/1", "place"] = "fail"
    with pytest.raises(WeightSyncError):
        await world.publish(2)
    await world.publish(2)
    orders = [[asked.order for asked in world.trainers[f"trainer/{rank}"].asked] for rank in range(2)]
    assert orders[0] == orders[1]
    assert orders[0] == sorted(set(orders[0]))
    assert len(orders[0]) == 3
    await world.coordinator.aclose()


@virtual
async def test_engines_serve_while_trainers_place_and_ranks_prepare() -> None:
    world = fleet()
    await world.publish(1)
    world.log.clear()
    world.delays["trainer/1", "place"] = 20.0
    world.delays["sick/1", "prepare"] = 30.0
    asking = asyncio.ensure_future(world.publish(2))
    await asyncio.sleep(19.0)
    assert all(process.generating and process.holds(1) for process in world.engines.values())
    assert (await asking).ok
    world.check()


@pytest.mark.parametrize("delivery", ["auto", "streamed"])
@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(PHASES, KINDS)))
@virtual
async def test_a_replica_that_fails_hurts_only_itself(phase: str, kind: str, delivery: Delivery) -> None:
    world = fleet(delivery=delivery)
    loop = asyncio.get_running_loop()
    for number in (1, 2):
        # in the second publication prepare is skipped (nothing changed), so a fault there waits for the re-prepared replica
        if number == 2:
            if phase == "prepare":
                for link in world.coordinator._members.replicas["sick"].links.values():
                    link.prepared = None
            world.faults["sick/1", phase] = kind
        world.log.clear()
        started = loop.time()
        result = await world.publish(number, timeout=60.0)
        took = loop.time() - started
        assert result.ok
    assert took <= 60.0
    if kind in ("fail", "crash", "lost", "vanish"):
        assert took < 1.0, "a failure or a lost rank is known at once"
    assert not world.faults, "the fault was not met"
    # the others were done at once, whatever the sick one did
    for time, member, called in world.log:
        if not member.startswith("sick"):
            assert time - started < 1.0, (member, called)
    assert world.states()["well"] == world.states()["fine"] == ("loaded", 2)
    sick = next(replica for replica in result.replicas if replica.name == "sick")
    assert sick.error is not None
    assert sick.error.startswith({"prepare": "agree", "resume": "commit"}.get(phase, phase)), sick.error
    assert "sick" in sick.error
    gone = kind in ("lost", "vanish")
    if gone:
        assert world.states()["sick"] == ("lost", None)
    elif phase == "prepare":
        assert world.states()["sick"] == ("loaded", 1), "it was not paused, and goes on serving what it has"
    else:
        assert (sick.state, sick.service) == ("dirty", "out_of_service")
        assert world.states()["sick"][1] is None
        assert not any(rank.generating for rank in world.replica("sick"))
    world.check()
    if not gone and phase != "prepare":
        await world.drain(10.0)
        assert world.states()["sick"] == ("loaded", 2), "it gets one more attempt at once, from the regions"
    # the next round heals it
    for rank in world.replica("sick"):
        if not rank.connected:
            rank.label = None
            rank.connect()
    await world.drain()
    assert world.states()["sick"][0] == "loaded"
    world.check()
    assert (await world.publish(3)).ok
    assert set(world.states().values()) == {("loaded", 3)}
    world.check()
    await world.coordinator.aclose()


@pytest.mark.parametrize("kind", ["partial", "corrupt", "zero", "undigested"])
@pytest.mark.parametrize("delivery", ["auto", "streamed"])
@virtual
async def test_a_wrong_move_is_never_labelled(kind: str, delivery: Delivery) -> None:
    world = fleet(delivery=delivery)
    world.faults["sick/1", "move"] = kind
    result = await world.publish(1)
    sick = next(replica for replica in result.replicas if replica.name == "sick")
    assert sick.error is not None
    assert ("ProtocolError" if kind == "undigested" else "VerificationError") in sick.error
    assert (sick.state, sick.version, sick.digest, sick.verified) == ("dirty", None, None, "")
    assert not any(called in ("commit", "resume") for _, member, called in world.log if member.startswith("sick"))
    assert world.states()["well"] == ("loaded", 1)
    world.check()


@virtual
async def test_a_plan_understood_differently_fails_before_anything_is_paused() -> None:
    world = fleet()
    world.faults["sick/0", "prepare"] = "other"
    await world.drain(1)  # when it prepares ahead of the round
    world.faults["sick/0", "prepare"] = "other"
    result = await world.publish(1)
    sick = next(replica for replica in result.replicas if replica.name == "sick")
    assert sick.error is not None
    assert "PlanMismatch" in sick.error
    assert not any(called == "pause" for _, member, called in world.log if member.startswith("sick"))


@pytest.mark.parametrize("phase", ["prepare", "pause", "move", "commit", "resume"])
@pytest.mark.parametrize("slow", [False, True])
@virtual
async def test_cancelling_a_round_leaves_no_pause_without_quarantine(phase: str, slow: bool) -> None:
    world = fleet()
    await world.publish(1)
    for link in world.coordinator._members.replicas["sick"].links.values():
        link.prepared = None
    world.faults["sick/1", phase] = "hang"
    if slow:
        world.faults["sick/0", "quarantine"] = "stubborn"
    asking = [asyncio.ensure_future(world.coordinator.publish(member, Publish(2), 600.0)) for member in world.trainers]
    await asyncio.sleep(2.0)
    assert world.states()["sick"][0] == ("loaded" if phase == "prepare" else "updating")
    started = asyncio.get_running_loop().time()
    await world.coordinator.aclose()
    assert asyncio.get_running_loop().time() - started <= GRACE + 0.1
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, WeightSyncError) for error in ended), ended
    assert world.states()["sick"] == (("loaded", 1) if phase == "prepare" else ("dirty", None))
    assert world.states()["well"] == ("loaded", 2)
    world.check()


@pytest.mark.parametrize("kind", ["fail", "hang", "stubborn", "lost", "vanish", "short"])
@virtual
async def test_a_trainer_that_cannot_place_pauses_nobody(kind: str) -> None:
    world = fleet()
    await world.publish(1)
    world.faults["trainer/1", "place"] = kind
    world.log.clear()
    started = asyncio.get_running_loop().time()
    wanted = {"fail": LoadError, "short": ProtocolError, "lost": PeerLost, "vanish": PeerLost}.get(kind, DeadlineExceeded)
    with pytest.raises(wanted, match="trainer/1"):
        await world.publish(2, timeout=60.0)
    assert asyncio.get_running_loop().time() - started <= 60.0
    assert not any(called == "pause" for _, _, called in world.log)
    assert set(world.states().values()) == {("loaded", 1)}
    world.check()


@virtual
async def test_streamed_gives_every_rank_all_tensors() -> None:
    world = World()
    world.add_trainers(3)
    world.add_replica("r", ranks=2, delivery="streamed")
    result = await world.publish(0)
    assert result.ok
    assert result.nbytes == 2 * MANIFEST.nbytes
    assert result.replicas[0].delivery == "streamed"
    assert all(rank.plan is not None and rank.plan.reason == "the engine asked for it" for rank in world.replica("r"))


@pytest.mark.parametrize(
    ("require", "ok"), [("any", True), ("all", False), (0, True), (1, True), (2, True), (3, False)]
)  # fmt: skip
@virtual
async def test_policy(require: str | int, ok: bool) -> None:
    world = fleet(RoundSettings(run="test", require=require, grace=GRACE))  # type: ignore[arg-type]
    world.faults["sick/0", "move"] = "fail"
    result = await world.publish(1)
    assert result.ok is ok
    assert (result.error is None) is ok
    if not ok:
        assert result.error is not None
        assert "sick" in result.error


@pytest.mark.parametrize(("require", "ok"), [("any", False), ("all", False), (0, True)])
@virtual
async def test_a_round_without_replicas_is_no_success_unless_asked_for(require: str | int, ok: bool) -> None:
    world = World(RoundSettings(run="test", require=require))  # type: ignore[arg-type]
    world.add_trainers(1)
    result = await world.publish(1)
    assert result.ok is ok


@virtual
async def test_nothing_to_publish_is_an_error() -> None:
    world = World()
    world.add_trainers(1, Manifest([TensorSpec("empty", (1, 0), "uint8")]))
    with pytest.raises(ConfigurationError, match="no bytes"):
        await world.publish(1)


@virtual
async def test_a_failed_resume_on_one_rank_stops_the_other_again() -> None:
    world = fleet()
    world.faults["sick/1", "resume"] = "late"  # took effect, the answer got lost
    await world.publish(1)
    assert world.states()["sick"] == ("dirty", None)
    assert not any(rank.generating for rank in world.replica("sick"))
    world.check()


@virtual
async def test_a_quarantine_that_hangs_is_bounded_by_the_grace() -> None:
    world = fleet()
    world.faults["sick/1", "move"] = "fail"
    world.faults["sick/0", "quarantine"] = "stubborn"
    started = asyncio.get_running_loop().time()
    assert (await world.publish(1)).ok
    assert GRACE <= asyncio.get_running_loop().time() - started <= GRACE + 1
    assert world.states()["sick"] == ("dirty", None)
    world.check()


@pytest.mark.parametrize("places", [1, 2])
@virtual
async def test_a_rolling_round_takes_few_replicas_out_of_service_at_a_time(places: int) -> None:
    world = fleet(RoundSettings(run="run", grace=GRACE, max_unavailable=places))
    assert (await world.publish(1)).ok  # nobody served: all at once
    for name in ("sick", "well", "fine"):
        world.delays[f"{name}/0", "move"] = 5.0
    asking = asyncio.ensure_future(world.publish(2, timeout=120.0))
    most = 0
    while not asking.done():
        await asyncio.sleep(0.01)
        out = {member.split("/")[0] for member, process in world.engines.items() if not process.generating}
        most = max(most, len(out))
    result = await asking
    assert result.ok, result.error
    assert most == places
    assert world.states() == {"sick": ("loaded", 2), "well": ("loaded", 2), "fine": ("loaded", 2)}
    waited = [replica.name for replica in result.replicas if "wait" in replica.phases]
    assert len(waited) == 3 - places
    assert all(replica.paused_seconds < 6.0 for replica in result.replicas)  # waiting for its turn is not a pause
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_rolling_round_goes_on_after_a_replica_that_fails() -> None:
    world = fleet(RoundSettings(run="run", grace=GRACE, max_unavailable=1))
    await world.publish(1)
    world.faults["sick/1", "move"] = "fail"
    result = await world.publish(2, timeout=120.0)
    assert {replica.name: replica.error is None for replica in result.replicas} == {"sick": False, "well": True, "fine": True}
    await world.drain()
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_replica_that_waits_for_its_turn_until_the_deadline_goes_on_serving() -> None:
    world = fleet(RoundSettings(run="run", grace=GRACE, max_unavailable=1))
    await world.publish(1)
    for name in ("sick", "well", "fine"):
        world.faults[f"{name}/0", "move"] = "hang"
    result = await world.publish(2, timeout=30.0)
    hung = [replica for replica in result.replicas if replica.state == "dirty"]
    kept = [replica for replica in result.replicas if replica.state == "loaded"]
    assert (len(hung), len(kept)) == (1, 2)
    assert all(replica.version == 1 and "waiting for its turn" in (replica.error or "") for replica in kept)
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_an_update_that_once_took_a_whole_round_holds_no_replica_back() -> None:
    """One that had hung until its round's end was refused the next time, because its turn came after five seconds."""
    world = fleet(RoundSettings(run="run", grace=GRACE, max_unavailable=1))
    assert (await world.publish(1)).ok
    for name in ("sick", "well", "fine"):
        world.delays[f"{name}/0", "move"] = 5.0
        world.coordinator._members.replicas[name].paused_seconds = 60.0
    result = await world.publish(2, timeout=60.0)
    assert {replica.name: replica.error for replica in result.replicas if replica.version != 2} == {}
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_replica_whose_turn_comes_too_late_for_its_update_goes_on_serving() -> None:
    """A rank that cannot pause says so just before the deadline (schedule 4100598). Whoever is next serves, and is not held back
    a second time by an update that once took long."""
    world = fleet(RoundSettings(run="run", grace=GRACE, max_unavailable=1))
    for name in ("sick", "well", "fine"):
        world.delays[f"{name}/0", "move"] = 5.0
    assert (await world.publish(1)).ok
    world.delays["sick/1", "pause"], world.faults["sick/1", "pause"] = 22.0, "fail"
    first = {replica.name: replica for replica in (await world.publish(2, timeout=30.0)).replicas}
    kept = [replica for name, replica in first.items() if name != "sick"]
    assert [(replica.state, replica.version) for replica in kept] == [("loaded", 1)] * 2
    assert all((replica.error or "").startswith("wait: DeadlineExceeded: its turn came") for replica in kept)
    await world.drain()
    world.delays.clear()
    second = await world.publish(3, timeout=4.0)
    assert second.ok, second.error
    assert world.states() == {"sick": ("loaded", 3), "well": ("loaded", 3), "fine": ("loaded", 3)}
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_dirty_replica_gets_one_more_attempt_at_once() -> None:
    world = fleet(RoundSettings(run="run", grace=GRACE))
    await world.publish(1)
    world.faults["sick/1", "move"] = "fail"
    result = await world.publish(2)
    assert [replica.name for replica in result.replicas if replica.error is not None] == ["sick"]
    await asyncio.sleep(1.0)
    assert world.states()["sick"] == ("loaded", 2)
    rounds = len(world.coordinator.status().rounds)
    world.faults["sick/1", "move"] = "fail"
    await world.publish(3)
    world.faults["sick/0", "pause"] = "fail"
    await world.drain()
    assert world.states()["sick"] == ("dirty", None)
    assert len(world.coordinator.status().rounds) == rounds + 2, "one attempt, not a loop"
    world.check()
    await world.coordinator.aclose()


@virtual
async def test_a_short_publication_ends_by_its_own_timeout() -> None:
    world = fleet()
    await world.publish(1)
    world.faults["sick/1", "move"] = "stubborn"
    started = asyncio.get_running_loop().time()
    await world.publish(2, timeout=3.0)
    assert asyncio.get_running_loop().time() - started <= 3.0
    world.check()
    await world.coordinator.aclose()
