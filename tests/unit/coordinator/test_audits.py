"""Replicas that serve are read again, within their share of the time; a difference takes them out of service, and heals them."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from msgspec import structs
from tests.unit.coordinator.fakes import GRACE, FakeEngine, World
from tests.unit.coordinator.test_coordinator import restart
from tests.unit.coordinator.test_sources import served
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator.audits import Audits
from weightsync.coordinator.events import Audited
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.replicas import Looks
from weightsync.coordinator.report import Report
from weightsync.model import Version
from weightsync.protocol.messages import Audit, Body, ReplicaResult

LEAST = 10.0
MOMENT = 0.01  # that each call takes


def fleet(ranks: int = 1, share: float = 0.01) -> World:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, audit_share=share))
    world.add_trainers(1)
    for name in ("one", "two"):
        world.add_replica(name, ranks)
    world.coordinator._audits.stagger = lambda: 1.0
    return world


def looks(world: World, member: str) -> list[float]:
    """When a rank was asked to look at what it serves."""
    return [at for at, who, _ in world.looks if who == member]


def apart(world: World, member: str) -> list[float]:
    times = looks(world, member)
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]


@virtual
async def test_every_rank_of_a_replica_that_serves_is_asked_again_and_again() -> None:
    world = fleet(ranks=2)
    await asyncio.sleep(100.0)
    assert not world.looks, "nobody serves anything"
    await world.publish(1)
    heard = world.coordinator.subscribe()
    await asyncio.sleep(10 * (LEAST + MOMENT))
    for member in world.engines:
        assert len(looks(world, member)) >= 9
        assert set(apart(world, member)) == {LEAST + MOMENT}
    await world.coordinator.aclose()
    audits = [event async for event in heard if isinstance(event, Audited)]
    assert {(event.replica, round(event.seconds, 3), event.error) for event in audits} == {
        ("one", MOMENT, None),
        ("two", MOMENT, None),
    }


@virtual
async def test_a_long_look_is_rare() -> None:
    world = fleet(share=0.02)
    world.delays["one/0", "audit"] = 3.0
    await world.publish(1)
    await asyncio.sleep(1000.0)
    assert set(apart(world, "one/0")) == {3.0 / 0.02 + 3.0}, "the slow one"
    assert set(apart(world, "two/0")) == {LEAST + MOMENT}
    await world.coordinator.aclose()


@virtual
async def test_a_share_of_nothing_turns_it_off() -> None:
    world = fleet(share=0.0)
    await world.publish(1)
    await asyncio.sleep(1000.0)
    assert not looks(world, "one/0")
    await world.coordinator.aclose()


@virtual
async def test_a_replica_whose_weights_were_changed_leaves_service_and_gets_them_again() -> None:
    world = fleet(ranks=2)
    await world.publish(1)
    heard = world.coordinator.subscribe()
    world.faults["one/1", "audit"] = "differ"
    await asyncio.sleep(LEAST + 2 * MOMENT)
    status = {replica.name: replica for replica in world.coordinator.status().replicas}
    assert (status["one"].state, status["two"].state) == ("dirty", "loaded")
    assert "parameters of one/1 were changed since it installed" in (status["one"].error or "")
    await asyncio.sleep(5.0)
    assert world.states() == {"one": ("loaded", 1), "two": ("loaded", 1)}, "re-seeded"
    world.check()
    await asyncio.sleep(3 * LEAST)
    assert len(looks(world, "one/0")) >= 3, "and it is looked at again"
    await world.coordinator.aclose()
    [failed] = [event async for event in heard if isinstance(event, Audited) and event.error]
    assert (failed.replica, failed.error) == ("one", status["one"].error)


@virtual
async def test_a_round_does_not_wait_for_a_look() -> None:
    world = fleet()
    await world.publish(1)
    world.delays["one/0", "audit"] = 50.0
    await asyncio.sleep(LEAST + 1.0)
    before = asyncio.get_running_loop().time()
    result = await world.publish(2)
    assert result.ok
    assert asyncio.get_running_loop().time() - before < 1.0
    world.delays.clear()
    await asyncio.sleep(1.0 / 0.01 + LEAST)
    assert looks(world, "one/0"), "the version after it is looked at"
    world.check()
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("fault", ["fail", "crash"])
async def test_a_look_that_fails_says_nothing_against_the_replica_and_is_repeated_later(fault: str) -> None:
    world = fleet()
    await world.publish(1)
    world.faults["one/0", "audit"] = fault
    await asyncio.sleep(LEAST + 1.0)
    assert world.states()["one"] == ("loaded", 1)
    assert not looks(world, "one/0")
    await asyncio.sleep(2 * LEAST)
    assert len(looks(world, "one/0")) == 1, "after twice the time"
    await asyncio.sleep(LEAST)
    assert len(looks(world, "one/0")) == 2, "and then as before"
    await world.coordinator.aclose()


@virtual
async def test_a_rank_that_can_never_look_is_asked_ever_more_rarely() -> None:
    world = fleet()
    await world.publish(1)
    asked: list[float] = []
    for _ in range(2000):
        world.faults["one/0", "audit"] = "fail"
        await asyncio.sleep(1.0)
        if ("one/0", "audit") not in world.faults:
            asked.append(asyncio.get_running_loop().time())
    assert len(asked) == 8
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("during", [True, False])
async def test_a_replica_that_connects_again_is_looked_at_again(during: bool) -> None:
    world = fleet()
    await world.publish(1)
    world.delays["one/0", "audit"] = 2.0
    await asyncio.sleep(LEAST + 1.0 if during else LEAST / 2)
    world.engines["one/0"].connect()
    assert world.states()["one"] == ("loaded", 1)
    await asyncio.sleep(3000.0)
    assert 12 < len(looks(world, "one/0")) < 16
    await world.coordinator.aclose()


@virtual
async def test_what_a_rank_found_is_known_when_another_rank_of_its_replica_is_back() -> None:
    world = fleet(ranks=2)
    await world.publish(1)
    world.faults |= {("one/0", "audit"): "differ", ("one/1", "audit"): "lost"}
    await asyncio.sleep(LEAST + 1.0)
    assert world.states()["one"] == ("lost", None)
    world.check()
    world.engines["one/1"].connect()
    assert world.states()["one"][0] in ("dirty", "updating")
    await asyncio.sleep(5.0)
    assert world.states()["one"] == ("loaded", 1)
    world.check()
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("reported", [True, False])
async def test_a_rank_whose_connection_breaks_before_it_is_quarantined_goes_out_of_service_when_it_is_back(reported: bool) -> None:
    world = fleet()
    await world.publish(1)
    heard, process = world.coordinator.subscribe(), world.engines["one/0"]
    version = process.label
    assert version is not None
    world.faults["one/0", "quarantine"] = "stubborn"  # it never arrives
    if not reported:
        process.disconnect()
    process.refute(version)
    process.disconnect()
    world.faults.clear()
    process.connect()
    assert world.states()["one"] == ("dirty", None)
    await asyncio.sleep(5.0)
    assert world.states()["one"] == ("loaded", 1)
    world.check()
    await world.coordinator.aclose()
    assert len([event async for event in heard if isinstance(event, Audited)]) == 1


@virtual
@pytest.mark.parametrize("reaches_its_pause", [True, False])
async def test_what_is_found_in_a_round_counts_unless_the_round_updates_the_replica(reaches_its_pause: bool) -> None:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, max_unavailable=1))
    world.add_trainers(1)
    for name in ("one", "two"):
        world.add_replica(name)
    await world.publish(1)
    heard, process = world.coordinator.subscribe(), world.engines["two/0"]
    version = process.label
    assert version is not None
    world.delays["one/0", "move"] = 5.0 if reaches_its_pause else 100.0
    asking = asyncio.ensure_future(world.publish(2, timeout=30.0))
    await asyncio.sleep(1.0)  # it waits for its turn
    process.refute(version)
    assert world.states()["two"] == ("loaded", 1), "not both at once"
    await asyncio.wait([asking], timeout=60.0)
    assert world.states()["two"] == (("loaded", 2) if reaches_its_pause else ("dirty", None))
    world.delays.clear()
    await asyncio.sleep(10.0)
    assert world.states()["two"] == ("loaded", 2)
    world.check()
    await world.coordinator.aclose()
    assert len([event async for event in heard if isinstance(event, Audited) and event.error]) == 1


@virtual
async def test_what_is_found_of_a_version_that_was_replaced_since_counts_for_nothing() -> None:
    world = fleet()
    await world.publish(1)
    version = world.engines["one/0"].label
    assert version is not None
    await world.publish(2)
    world.coordinator.refuted("one/0", version, "parameters of one/0 were changed")
    assert world.states()["one"] == ("loaded", 2)
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("every", [14.0, 20.0])
async def test_rounds_neither_add_to_the_share_of_looks_nor_keep_all_of_them_from_ending(every: float) -> None:
    seconds, share = 5.0, 0.02
    world = fleet(share=share)
    drawn = itertools.cycle([0.1, 0.9, 0.5, 0.3])
    world.coordinator._audits.stagger = lambda: next(drawn)
    took: list[float] = []
    real = FakeEngine.call

    async def call(self: FakeEngine, body: Body, timeout: float) -> Body:
        began = asyncio.get_running_loop().time()
        try:
            return await real(self, body, timeout)
        finally:
            if isinstance(body, Audit) and self.process.member == "one/0":
                took.append(asyncio.get_running_loop().time() - began)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "call", call)
        world.delays["one/0", "audit"] = seconds
        started = asyncio.get_running_loop().time()
        for number in range(1, 200):
            await world.publish(number)
            await asyncio.sleep(every)
        total = asyncio.get_running_loop().time() - started
    assert sum(took) <= share * total + seconds
    assert looks(world, "one/0"), "some come to an end"
    await world.coordinator.aclose()


@virtual
async def test_a_replica_of_which_only_a_loader_knows_what_it_installed_is_not_asked() -> None:
    world, real = fleet(), Report.result

    def received(self: Report, publications: Publications) -> ReplicaResult:
        self.moved = {member: structs.replace(moved, verified="received") for member, moved in self.moved.items()}
        return real(self, publications)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "result", received)
        await world.publish(1)
    await asyncio.sleep(100 * LEAST)
    assert not world.looks
    await world.coordinator.aclose()


@virtual
@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_changes_again_after_it_was_installed_again_is_let_be_until_the_next_version(ranks: int) -> None:
    world = fleet(ranks)
    heard = world.coordinator.subscribe()
    for number in (1, 2):
        await world.publish(number)
        for _ in range(100):
            world.faults["one/0", "audit"] = "differ"
            await asyncio.sleep(5.0)
        assert world.states()["one"] == ("loaded", number)
        assert [alert.kind for alert in world.coordinator.status().alerts] == ["restless"]
        world.check()
    del world.faults["one/0", "audit"]
    await world.publish(3)
    world.looks.clear()
    await asyncio.sleep(5 * LEAST)
    assert looks(world, "one/0")
    assert not world.coordinator.status().alerts
    await world.coordinator.aclose()
    alarms = [event.error async for event in heard if isinstance(event, Audited) and event.error]
    assert ["the same as before" in alarm for alarm in alarms] == 2 * [False, True]


@virtual
async def test_a_replica_from_which_others_read_is_not_looked_at() -> None:
    world = await served("one", serving=("one",))
    world.delays["one/0", "audit"] = 1.0
    await asyncio.sleep(LEAST)
    world.delays["new/0", "move"] = 300.0
    world.add_replica("new")
    await asyncio.sleep(1.0)
    world.looks.clear()
    await asyncio.sleep(250.0)
    assert not looks(world, "one/0")
    await asyncio.sleep(200.0)
    assert world.states()["new"] == ("loaded", 1)
    assert looks(world, "one/0"), "and afterwards it is"
    await world.coordinator.aclose()


@virtual
async def test_nobody_is_looked_at_while_it_prepares() -> None:
    world = fleet()
    await world.publish(1)
    world.trainers["trainer/0"].disconnect()
    for name in ("one/0", "two/0"):
        world.delays[name, "prepare"] = 100.0
    world.live = True  # so that nothing can be seeded
    world.add_trainers(1)
    world.looks.clear()
    await asyncio.sleep(90.0)
    assert not world.looks
    await asyncio.sleep(60.0)
    assert looks(world, "one/0")
    await world.coordinator.aclose()


@virtual
async def test_a_round_that_cannot_even_begin_ends_no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fleet()
    await world.publish(1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(world.coordinator._planner, "keep_only", lambda names: 1 / 0)
        await world.publish(2)
    await asyncio.sleep(2 * LEAST)
    assert looks(world, "one/0")
    await world.coordinator.aclose()


@virtual
async def test_a_fleet_is_not_looked_at_all_at_once() -> None:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0))
    world.add_trainers(1)
    for number in range(20):
        world.add_replica(f"r{number}")
    world.coordinator._audits.stagger = random.Random(5).random
    await world.publish(1)
    await asyncio.sleep(1.5 * LEAST)
    times = sorted({who: at for at, who, _ in reversed(world.looks)}.values())  # each one's first
    assert len(times) == 20
    assert times[-1] - times[0] > LEAST / 2
    await world.coordinator.aclose()


@virtual
async def test_a_replica_that_a_restarted_coordinator_finds_serving_is_looked_at() -> None:
    world = fleet()
    await world.publish(1)
    restart(world)
    await asyncio.sleep(3 * LEAST)
    assert len(looks(world, "two/0")) >= 2
    await world.coordinator.aclose()


@virtual
async def test_nothing_of_it_is_left_when_replicas_left() -> None:
    world = fleet()
    await world.publish(1)
    for process in list(world.engines.values()):
        process.disconnect()
    await asyncio.sleep(2 * LEAST)
    audits: Audits = world.coordinator._audits
    assert not audits._tasks
    await world.coordinator.aclose()


@virtual
async def test_a_thousand_ranks_answer_one_in_ten_milliseconds() -> None:
    world = fleet(ranks=4)
    for number in range(300):
        world.add_replica(f"r{number}", 4)
    await world.publish(1)
    await asyncio.sleep(60.0)
    assert all(12.0 < seconds < 13.0 for seconds in apart(world, "r7/3"))
    assert looks(world, "r7/3")
    await world.coordinator.aclose()


@virtual
async def test_a_replica_that_waits_for_its_turn_in_a_round_is_not_looked_at() -> None:
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0, max_unavailable=1))
    world.add_trainers(1)
    for name in ("one", "two"):
        world.add_replica(name)
    await world.publish(1)
    world.delays["one/0", "move"] = world.delays["two/0", "move"] = 60.0
    world.looks.clear()
    asking = asyncio.ensure_future(world.publish(2, timeout=500.0))
    await asyncio.sleep(30.0)
    world.trainers["trainer/0"].disconnect()
    world.add_trainers(1)  # which confirms what replicas report
    await asyncio.sleep(25.0)
    assert not world.looks
    asking.cancel()
    await world.coordinator.aclose()


def test_alarms_that_are_remembered_are_few() -> None:
    looks, version = Looks(), Version("run", 1, "", "")
    assert not any(looks.alarm(version, f"weight.{number}") for number in range(1000))
    assert len(looks.alarms) <= 64
    assert looks.alarm(version, "weight.999")
    assert not looks.alarm(Version("run", 2, "", ""), "weight.999")


@virtual
async def test_a_look_that_hangs_until_its_deadline_does_not_put_off_the_next_for_hours() -> None:
    world = fleet()
    await world.publish(1)
    await asyncio.sleep(60)
    world.faults["one/0", "audit"] = "hang"
    await asyncio.sleep(world.coordinator.settings.timeout + 60)
    before = len(looks(world, "one/0"))
    await asyncio.sleep(1200)
    assert len(looks(world, "one/0")) > before + 2
