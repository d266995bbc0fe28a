"""What the coordinator keeps is bounded: history, errors, lost replicas, plans. What it lists of absent ranks, too."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST
from tests.unit.coordinator.fakes import World
from tests.virtual_time import virtual

from weightsync.coordinator import round_trace
from weightsync.coordinator.agent_messages import answer_agent
from weightsync.coordinator.report import round_result
from weightsync.model import PauseMode, Version
from weightsync.protocol.messages import CannotPublish, ReplicaResult, Updated


def result(name: str, error: str | None) -> ReplicaResult:
    return ReplicaResult(name, "dirty" if error else "loaded", 1, "0" * 16, 1, "direct", ("tcp",), "installed", {}, 0.0, error)


@pytest.mark.parametrize(("replicas", "most"), [(3, 4096), (1000, 1100), (8192, 300)])
def test_errors_of_very_many_replicas_are_cut(replicas: int, most: int) -> None:
    results = [result(f"r{number}", "x" * 4096) for number in range(replicas)]
    whole = round_result(1, Version("run", 1, "0" * 32, "0" * 16), "all", results, 0.0, 0.0)
    assert max(len(one.error or "") for one in whole.replicas) <= most
    assert sum(len(one.error or "") for one in whole.replicas) < 2 << 20
    assert len(whole.error or "") <= 4096
    assert not whole.ok


@virtual
async def test_the_history_holds_fewer_rounds_of_many_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trace, "_MOST_RESULTS", 10)
    world = World()
    world.add_trainers(1)
    for number in range(4):
        world.add_replica(f"r{number}")
    for number in range(1, 6):
        await world.publish(number)
    assert [one.version.number for one in world.coordinator.status().rounds] == [4, 5]
    monkeypatch.setattr(round_trace, "_MOST_RESULTS", 1)
    await world.publish(6)
    assert [one.version.number for one in world.coordinator.status().rounds] == [6], "the last one is always there"


@virtual
async def test_a_replica_that_never_was_complete_is_forgotten_and_others_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.coordinator.membership._REMEMBERED_LOST", 2)
    world = World()
    half = world.add_engine("half", 0, 4096)
    assert world.state("half").missing == tuple(range(1, 17))
    half.disconnect()
    assert world.states() == {}
    for name in ("a", "b", "c"):
        world.add_replica(name, ranks=2)
    for name in ("b", "a", "c"):
        for process in world.replica(name):
            process.disconnect()
    assert world.states() == {"a": ("lost", None), "c": ("lost", None)}
    world.add_replica("a", ranks=2)
    for name in ("d", "e"):
        world.add_replica(name)
        world.replica(name)[0].disconnect()
    assert world.states() == {"a": ("registered", None), "d": ("lost", None), "e": ("lost", None)}


@virtual
async def test_plans_of_replicas_that_are_gone_are_dropped() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("stays")
    world.add_replica("goes", ranks=2)
    await world.publish(1)
    planner = world.coordinator._planner
    both = planner.room.taken
    assert set(planner.agreed) == {"stays", "goes"}
    for process in world.replica("goes"):
        process.disconnect()
    await world.publish(2)
    assert set(planner.agreed) == {"stays"}
    piece = 20 + 24 * MANIFEST.dims
    assert 0 < planner.room.taken == piece * planner.agreed["stays"].slices["stays/0"].pieces.rows < both


@virtual
async def test_without_room_a_replica_fails_and_says_what_to_do() -> None:
    world = World()
    world.coordinator._planner.room.nbytes = 100
    world.add_trainers(1)
    world.add_replica("r")
    outcome = await world.publish(1)
    assert "WEIGHTSYNC_PLAN_BYTES" in (outcome.replicas[0].error or "")
    assert world.coordinator._planner.room.taken == 0


@virtual
async def test_metrics_are_those_of_status() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await world.publish(3)
    status, gauges = world.coordinator.status(), world.coordinator.gauges()
    assert (gauges.run, gauges.last, gauges.busy, len(gauges.trainer)) == (status.run, 3, False, 2)
    (one,), (other,) = gauges.replicas, status.replicas
    fields = ("name", "state", "version", "staleness", "since")
    assert [getattr(one, field) for field in fields] == [getattr(other, field) for field in fields]


@virtual
async def test_what_a_trainer_rank_could_not_publish_for_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.add_trainers(2)
    answer = answer_agent(world.coordinator, world.trainers["trainer/0"].node.rank)
    await answer(CannotPublish(1, "Error\n2026-11-23 INFO trainer/0 joined\x1b[2J", "other\nshards"), 5.0)
    (text,) = [record.getMessage() for record in caplog.records if "cannot publish" in record.getMessage()]
    assert "\x1b" not in text
    assert all(line.startswith("  ") for line in text.split("\n")[1:])


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
@virtual
async def test_parts_of_a_move_take_no_longer_than_was_measured(seconds: float) -> None:
    world = World()
    world.add_trainers(1)
    world.add_replica("a")
    node = world.engines["a/0"].node
    update = node.update

    async def lying(version: Version, mode: PauseMode) -> Updated:
        updated = await update(version, mode)
        changed: Updated = structs.replace(
            updated, moved=structs.replace(updated.moved, receive_seconds=seconds, load_seconds=seconds)
        )
        return changed

    node.update = lying
    (replica,) = (await world.publish(1)).replicas
    assert replica.error is None
    assert all(0.0 <= part <= sum(replica.phases.values()) for part in replica.parts.values())
