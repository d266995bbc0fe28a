"""Rounds whose source is a stream, with faults at every step: nobody is torn, others finish, ranks go on to the end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.coordinator.contents import STREAMED
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import virtual

from weightsync.config import RoundSettings
from weightsync.coordinator import stream_round
from weightsync.errors import ConfigurationError, ProtocolError, VerificationError, WeightSyncError
from weightsync.model import Manifest
from weightsync.model.window import WindowPart
from weightsync.protocol.messages import Answer, WindowPlaced, decode, encode

NOTHING = Manifest(())
STEPS = ("pause", "window", "end", "commit", "resume")


def stream_world(trainers: int = 2, windows: int = 2, *, shared: bool = False, **settings: object) -> World:
    """Trainer ranks with few windows, an engine of two ranks, one of one, and a receiver."""
    rules = RoundSettings(run="test", grace=GRACE, timeout=600.0, require="any", **settings)  # type: ignore[arg-type]
    world = World(rules, live=True, windows=windows, shared=shared)
    world.add_trainers(trainers, NOTHING)
    world.add_replica("duo", 2)
    world.add_replica("solo")
    world.add_replica("receiver", manifest=NOTHING)
    return world


@pytest.mark.parametrize("trainers", [1, 2, 3, 9])
@pytest.mark.parametrize("windows", [2, 3])
@virtual
async def test_all_replicas_take_the_one_pass(trainers: int, windows: int) -> None:
    world = stream_world(trainers, windows)
    for number in (1, 2):
        result = await world.publish(number)
        assert result.ok
        assert result.version.manifest == STREAMED.fingerprint
        assert {replica.verified for replica in result.replicas} == {"received"}
        assert set(world.states().values()) == {("loaded", number)}
        world.check()


@virtual
async def test_windows_are_read_from_the_rank_that_placed_them_whoever_joined_first() -> None:
    world = World(RoundSettings(run="test", timeout=600.0), live=True, windows=2)
    world.add_replica("solo")
    for rank in (2, 0, 1):
        world.add_trainer(rank, 3, NOTHING)
    await world.drain()  # the replica is prepared ahead
    assert (await world.publish(1)).ok
    world.check()


@pytest.mark.parametrize("kind", ["fail", "crash", "hang", "stubborn", "lost", "vanish"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("member", ["duo/1", "solo/0", "receiver/0"])
@pytest.mark.parametrize("shared", [False, True])
@virtual
async def test_a_replica_that_fails_fails_alone(member: str, step: str, kind: str, shared: bool) -> None:
    world = stream_world(shared=shared)
    name = member.partition("/")[0]
    others = [other for other in ("duo", "solo", "receiver") if other != name]
    assert (await world.publish(1)).ok
    before = asyncio.get_running_loop().time()
    world.faults[member, step] = kind
    result = await world.publish(2)
    assert asyncio.get_running_loop().time() - before <= 60.0
    errors = {replica.name: replica.error for replica in result.replicas}
    assert errors[name] is not None
    assert [errors[other] for other in others] == [None, None]
    assert all(world.states()[other] == ("loaded", 2) for other in others)
    world.check()
    await world.drain()
    world.check()


@pytest.mark.parametrize(("step", "kind"), [("window", "corrupt"), ("end", "corrupt"), ("end", "undigested")])
@virtual
async def test_other_bytes_than_the_published_ones_are_never_labelled(step: str, kind: str) -> None:
    world = stream_world()
    world.faults["solo/0", step] = kind
    result = await world.publish(1)
    assert {replica.name for replica in result.replicas if replica.error is None} == {"duo", "receiver"}
    assert world.states()["solo"][1] is None
    world.check()
    assert (await world.publish(2)).replicas[0].error is None
    assert set(world.states().values()) == {("loaded", 2)}


@virtual
async def test_replicas_cannot_spoil_the_result_for_all_with_bytes_that_they_did_not_move() -> None:
    """The sum of two such counts fits no message: nobody would get the result."""
    world = stream_world()
    world.faults["duo/0", "end"] = world.faults["solo/0", "end"] = "immense"
    result = await world.publish(1)
    assert msgspec.msgpack.encode(result)
    assert {replica.name for replica in result.replicas if replica.error is None} == {"receiver"}
    world.check()


@pytest.mark.parametrize("kind", ["fail", "crash", "hang", "lost", "vanish", "short"])
@virtual
async def test_a_trainer_rank_that_fails_ends_the_round_and_the_number_is_free(kind: str) -> None:
    world = stream_world()
    assert (await world.publish(1)).ok
    world.delays["trainer/1", "window"] = 0.2
    if kind == "short":
        world.faults["trainer/1", "end"] = kind
    publishing = asyncio.ensure_future(world.publish(2))
    await asyncio.sleep(0.5)
    if kind != "short":
        world.faults["trainer/1", "window"] = kind
    with pytest.raises(WeightSyncError):
        await publishing
    assert {state for state, _ in world.states().values()} == {"dirty"}
    world.check()
    for process in list(world.trainers.values()):
        process.disconnect()
    world.add_trainers(2, NOTHING)
    assert (await world.publish(2)).ok
    assert set(world.states().values()) == {("loaded", 2)}
    world.check()


@virtual
async def test_windows_of_two_streams_of_a_rank_are_no_version() -> None:
    world = stream_world()
    world.faults["trainer/1", "stamp"] = "other"
    with pytest.raises(ProtocolError, match="trainer/1 placed windows of two streams"):
        await world.publish(1)
    assert {state for state, _ in world.states().values()} == {"dirty"}
    world.check()
    assert (await world.publish(1)).ok


@virtual
async def test_ranks_whose_tensors_differ_are_named_and_publish_nothing() -> None:
    world = stream_world(3)
    world.faults["trainer/2", "sample"] = "drifted"
    with pytest.raises(VerificationError, match=r"trainer/0 and trainer/2 stream different values of t3 \(1 of 8 compared"):
        await world.publish(1)
    assert {state for state, _ in world.states().values()} == {"dirty"}
    world.faults["trainer/1", "sample"] = "short"
    with pytest.raises(ProtocolError, match="trainer/1 sent 56 bytes of digests of 8 sampled tensors"):
        await world.publish(1)
    assert (await world.publish(1)).ok
    world.check()


@virtual
async def test_a_stream_has_so_many_parts_and_one_that_fails_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer rank that never ended its stream: 178 MB of descriptions took 1.2 GB of the coordinator, and kept it."""
    world = stream_world()
    monkeypatch.setattr(stream_round, "_MOST_PARTS", len(STREAMED) - 1)
    with pytest.raises(ConfigurationError, match="put some together"):
        await world.publish(1)
    assert not world.coordinator._publications.windows._known
    monkeypatch.setattr(stream_round, "_MOST_PARTS", len(STREAMED))
    assert (await world.publish(1)).ok
    assert len(world.coordinator._publications.windows._known) == len(STREAMED)
    world.check()


def test_a_part_of_a_window_has_no_name_that_no_tensor_has() -> None:
    part = WindowPart("n" * 1024, (1,), "int8", 0)
    assert decode(encode(Answer(1, WindowPlaced((part,), 1))))
    for wrong in ({"name": "n" * 1025}, {"dtype": "d" * 65}):
        with pytest.raises(ProtocolError):
            decode(encode(Answer(1, WindowPlaced((msgspec.structs.replace(part, **wrong),), 1))))


@virtual
async def test_a_stream_that_fails_before_its_first_window_pauses_no_engine() -> None:
    world = stream_world()
    assert (await world.publish(1)).ok
    world.faults["trainer/0", "window"] = "fail"
    with pytest.raises(WeightSyncError, match="told to fail"):
        await world.publish(2)
    assert {name: state for name, state in world.states().items() if name != "receiver"} == {
        "duo": ("loaded", 1),
        "solo": ("loaded", 1),
    }
    assert all(process.generating for process in [*world.replica("duo"), *world.replica("solo")])
    assert world.states()["receiver"] == ("dirty", None)  # it was told
    world.check()


@virtual
async def test_nobody_is_seeded_from_a_stream() -> None:
    world = stream_world()
    world.faults["solo/0", "window"] = "fail"
    await world.publish(1)
    world.add_replica("late")
    await world.drain()
    assert (world.states()["solo"], world.states()["late"]) == (("dirty", None), ("registered", None))
    assert (await world.publish(2)).ok
    assert set(world.states().values()) == {("loaded", 2)}


@pytest.mark.parametrize("shared", [False, True])
@virtual
async def test_replicas_take_windows_in_step_where_their_readers_share_a_broadcast(shared: bool) -> None:
    world = stream_world(1, 3, shared=shared)
    world.delays["solo/0", "pause"] = 5.0
    world.delays["solo/0", "window"] = 2.0
    assert (await world.publish(1)).ok
    times = {
        member: [time for time, who, phase in world.log if (who, phase) == (member, "window")] for member in ("duo/0", "solo/0")
    }
    [paused] = [time for time, who, phase in world.log if (who, phase) == ("solo/0", "pause")]
    assert (times["duo/0"][0] >= paused) == shared
    assert all(fast >= slow for fast, slow in zip(times["duo/0"][1:], times["solo/0"], strict=False)) == shared
    world.check()


@pytest.mark.parametrize("shared", [False, True])
@virtual
async def test_a_hanging_replica_leaves_the_others_half_of_the_time(shared: bool) -> None:
    world = stream_world(shared=shared)
    world.faults["solo/0", "window"] = "stubborn"
    started = asyncio.get_running_loop().time()
    result = await world.publish(1, timeout=40.0)
    assert asyncio.get_running_loop().time() - started < 40.0
    assert {replica.name for replica in result.replicas if replica.error is None} == {"duo", "receiver"}
    world.check()


@virtual
async def test_replicas_that_may_not_be_out_of_service_together_are_not_paused() -> None:
    world = stream_world(max_unavailable=2)
    with pytest.raises(ConfigurationError, match="all 3 replicas"):
        await world.publish(1)
    assert not [entry for entry in world.log if entry[2] == "pause"]


@virtual
async def test_without_replicas_a_version_exists_and_nobody_has_it() -> None:
    world = World(RoundSettings(run="test", timeout=60.0), live=True, windows=2)
    world.add_trainers(2, NOTHING)
    result = await world.publish(1)
    assert not result.ok
    assert result.version.manifest == STREAMED.fingerprint


@pytest.mark.parametrize("seed", range(4))
@virtual
async def test_the_only_replica_that_hangs_fails_alone_too(seed: int) -> None:
    """Its time and that of the trainer's wait for it ended in the same moment, and which error came first was chance."""
    world = World(RoundSettings(run="test", grace=GRACE, timeout=600.0), live=True, windows=2)
    world.add_trainers(1, NOTHING)
    world.add_replica("solo")
    await world.publish(1)
    world.engines["solo/0"].disconnect()
    world.add_replica("solo")
    world.delays["solo/0", "prepare"] = 1000.0
    result = await world.publish(2, timeout=20.0 + seed / 10)
    [replica] = result.replicas
    assert (result.ok, replica.version) == (False, None if replica.state != "loaded" else 1)
    assert "agree: DeadlineExceeded" in (replica.error or "") or "prepar" in (replica.error or "")
    await world.coordinator.aclose()
