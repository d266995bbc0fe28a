"""Holds that a trainer that starts again may use its numbers again, that ranks agree on the epoch, and that order is kept."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, rows_layout
from tests.unit.coordinator.fakes import HOST, EngineProcess, FakeTrainer, TrainerProcess, World, world_of
from tests.unit.coordinator.test_coordinator import restart
from tests.virtual_time import virtual

from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.errors import VersionError
from weightsync.model import Version, label_of, parse_label
from weightsync.protocol.messages import Offer, Publish


def add(world: World, rank: int, count: int = 2, *, new_epoch: bool = True, epoch: int = 0, published: int = -1) -> TrainerProcess:
    """A new trainer process, made with ``new_epoch``; ``epoch`` and ``published`` are what it reports."""
    process = TrainerProcess(world, rank, count, MANIFEST, world.session(), published)
    session = world.session()
    process.make = lambda: TrainerRank(
        said(
            "trainer", rank, count, HOST, session=session, offers=(Offer("memory", "x", HOST),), published=published, epoch=epoch,
            new_epoch=new_epoch,
        ),
        MANIFEST, rows_layout(MANIFEST, rank, count),
    )  # fmt: skip
    process.connect()
    return process


def restart_trainer(world: World, *, new_epoch: bool = True) -> None:
    for process in list(world.trainers.values()):
        process.disconnect()
    for rank in range(2):
        add(world, rank, new_epoch=new_epoch)


@virtual
async def test_a_number_is_not_used_again_although_nobody_serves_its_version() -> None:
    """Trainer and coordinator are new processes, and the only engine that took the version is dirty (schedule 2730051)."""
    world = World()
    engine = EngineProcess(world, "r", 0, 1, world.session(), "auto", MANIFEST)
    made = engine.make

    def make() -> EngineRank:
        rank = made()
        hello = msgspec.structs.replace(rank.hello, version=Version("test", 440, "ab", "cd"))
        return EngineRank(hello, rank.manifest, rank.layout, None)

    engine.make = make
    engine.connect()
    for rank in range(2):
        add(world, rank, new_epoch=False)
    with pytest.raises(VersionError, match="the last one is 440"):
        await world.publish(400)
    assert (await world.publish(441)).ok


@virtual
async def test_a_trainer_that_resumes_uses_its_numbers_again() -> None:
    world = World()
    for rank in range(2):
        add(world, rank)
    world.add_replica("r")
    assert str((await world.publish(440)).version) == "test@440", "the first epoch is not in the label"
    restart_trainer(world, new_epoch=False)
    with pytest.raises(VersionError, match="the last one is 440"):
        await world.publish(400)
    restart_trainer(world)
    result = await world.publish(400)
    assert (str(result.version), result.replicas[0].epoch) == ("test.2@400", 2)
    with pytest.raises(VersionError, match="the last one is 400"):
        await world.publish(400)
    assert str((await world.publish(401)).version) == "test.2@401", "granted once for these processes"
    state, status = world.state("r"), world.coordinator.status()
    assert (state.version, state.epoch, state.staleness) == (401, 2, 0)
    assert (status.last, status.epoch) == (401, 2)
    world.check()


@virtual
async def test_an_epoch_begins_although_the_rank_that_knew_the_last_version_has_left() -> None:
    """The coordinator had restarted in between. It refused the number for one of the epoch before (schedule 10,000,081)."""
    world = World()
    before = TrainerProcess(world, 0, 1, MANIFEST, world.session(), 7)
    before.last = Version("test", 7, MANIFEST.fingerprint, "ab" * 8)
    before.connect()
    before.disconnect()
    add(world, 0, 1)
    assert str((await world.publish(4)).version) == "test.2@4"


@virtual
async def test_an_old_version_is_behind_a_new_epoch() -> None:
    world = World()
    for rank in range(2):
        add(world, rank)
    world.add_replica("r")
    await world.publish(440)
    restart_trainer(world)
    world.faults["r/0", "prepare"] = "fail"
    await world.drain(1)  # when it prepares ahead of the round
    world.faults["r/0", "prepare"] = "fail"
    await world.publish(1)
    assert (world.state("r").version, world.state("r").staleness) == (440, 1)


@virtual
async def test_after_the_last_epoch_none_begins() -> None:
    world = World()
    world.add_replica("r")
    world.coordinator._publications.own = world.coordinator._publications.newest = (1 << 31) - 2, 5
    for number in (1, 2):
        for rank in range(2):
            add(world, rank)
        if number == 1:
            assert (await world.publish(number)).version.order == ((1 << 31) - 1, number)
            for process in list(world.trainers.values()):
                process.disconnect()
    with pytest.raises(VersionError, match=r"epoch 2147483647 is the last one: .* Start another run"):
        await world.publish(2)


@virtual
async def test_all_ranks_ask_or_none() -> None:
    world = World()
    add(world, 0, new_epoch=True)
    add(world, 1, new_epoch=False)
    world.add_replica("r")
    with pytest.raises(VersionError, match="trainer/0 asked for a new epoch, trainer/1 did not"):
        await world.publish(1)
    assert world.coordinator.status().last == -1


@virtual
async def test_a_grant_outlives_a_publication_that_failed_and_the_coordinator() -> None:
    world = World()
    add(world, 0)
    add(world, 1)
    world.add_replica("r")
    await world.publish(440)
    restart_trainer(world)
    world.faults["trainer/1", "place"] = "fail"
    with pytest.raises(Exception, match="told to fail"):
        await world.publish(400)
    assert str((await world.publish(400)).version) == "test.2@400"
    fresh = World(world.settings)
    world.coordinator = fresh.coordinator
    for engine in world.engines.values():
        engine.connect()
    world.trainers.clear()
    add(world, 0, epoch=2, published=400)  # what it says after the coordinator told it
    add(world, 1)  # the same, but it was never told
    with pytest.raises(VersionError, match="the last one is 400"):
        await world.publish(400)
    assert str((await world.publish(401)).version) == "test.2@401"
    world.check()


@virtual
async def test_an_older_epoch_is_refused() -> None:
    world = World()
    add(world, 0)
    add(world, 1)
    world.add_replica("r")
    await world.publish(440)
    restart_trainer(world)
    await world.publish(400)
    for process in list(world.trainers.values()):
        process.disconnect()
    for rank in range(2):
        add(world, rank, new_epoch=False, epoch=1, published=440)
    with pytest.raises(VersionError, match="publishes in epoch 1, but epoch 2 has begun"):
        await world.publish(441)
    assert world.coordinator.status().epoch == 2


@virtual
async def test_the_last_number_is_that_of_the_epoch_that_a_rank_gets() -> None:
    world = World()
    add(world, 0, 1)
    world.add_replica("r")
    await world.publish(440)
    coordinator, [old] = world.coordinator, list(world.trainers.values())
    old.disconnect()
    assert coordinator.join_trainer(FakeTrainer(add_later(world, new_epoch=True))) == -1
    [link] = coordinator._members.trainers.values()
    coordinator.leave(link.node)
    assert coordinator.join_trainer(FakeTrainer(add_later(world, new_epoch=False))) == 440
    await asyncio.sleep(0)


@virtual
async def test_a_new_epoch_does_not_wait_for_the_numbers_of_the_old_one() -> None:
    world = World()
    add(world, 0, 1)
    world.add_replica("r")
    world.faults["r/0", "update"] = world.faults["r/0", "move"] = "hang"
    old = asyncio.ensure_future(world.publish(400, 60.0))
    await asyncio.sleep(1)
    [process] = list(world.trainers.values())
    process.disconnect()
    add(world, 0, 1)
    assert str((await world.publish(10, 120.0)).version) == "test.2@10"
    await asyncio.wait([old])
    world.check()


@virtual
async def test_in_one_epoch_the_number_of_a_running_round_counts() -> None:
    world = World()
    add(world, 0, 1)
    world.add_replica("r")
    running = asyncio.ensure_future(world.publish(400))
    await asyncio.sleep(0.005)  # it is being placed
    with pytest.raises(VersionError, match="the last one is 400"):
        await world.coordinator.publish("trainer/0", Publish(10), 60.0)
    await asyncio.wait([running])


def add_later(world: World, *, new_epoch: bool) -> TrainerProcess:
    process = add(world, 0, 1, new_epoch=new_epoch)
    process.disconnect()
    return process


@pytest.mark.parametrize(
    ("run", "epoch", "label"),
    [
        ("run", 1, "run@7"),
        ("run", 2, "run.2@7"),
        ("v1.2", 1, "v1.2.1@7"),
        ("v1.2", 3, "v1.2.3@7"),
        ("v1.0", 1, "v1.0@7"),
        ("a@b", 1, "a@b@7"),
    ],
)
def test_a_label_says_run_epoch_and_number(run: str, epoch: int, label: str) -> None:
    assert label_of(run, epoch, 7) == label
    assert str(Version(run, 7, "m", "d", epoch)) == label
    assert parse_label(label) == (run, epoch, 7)
    assert parse_label("7") == (None, 1, 7)
    assert parse_label("run@seven") is None


FIRST, MOST = (1, (1 << 63) - 1), ((1 << 31) - 1, 0)


def claim(world: World, order: tuple[int, int]) -> EngineProcess:
    """An engine of a thief, whose first message says that it serves this epoch and number."""
    world.add_replica("thief")
    (thief,) = world.replica("thief")
    thief.disconnect()
    thief.label = Version("test", order[1], MANIFEST.fingerprint, "0" * 16, order[0])
    thief.connect()
    return thief


@pytest.mark.parametrize("order", [FIRST, MOST, (1, 1 << 61), (2, 0)])
@pytest.mark.parametrize("known", ["published", "reported"])
@virtual
async def test_what_an_engine_claims_does_not_end_the_publications_of_a_trainer(known: str, order: tuple[int, int]) -> None:
    """The attack: a worker says that it serves the highest number or the next epoch, and no later number is possible."""
    world = World()
    for rank in range(2):
        add(world, rank, new_epoch=False, epoch=1, published=-1 if known == "published" else 7)
    if known == "published":
        await world.publish(7)
    claim(world, order)
    assert (await world.publish(8)).version.order == (1, 8)
    results = await asyncio.gather(*(world.coordinator.publish(f"trainer/{rank}", Publish(), 60.0) for rank in range(2)))
    assert results[0].version.order == (1, 9)


@pytest.mark.parametrize("granted", ["here", "by an earlier coordinator"])
@virtual
async def test_a_claim_of_the_next_epoch_does_not_end_a_trainer_whose_first_publication_failed(granted: str) -> None:
    """Found by schedule 2001831: the trainer had been granted epoch 1, in which nothing was published."""
    world = World()
    for rank in range(2):
        add(world, rank, new_epoch=False, epoch=0 if granted == "here" else 1)
    if granted == "here":
        world.faults["trainer/1", "place"] = "fail"
        with pytest.raises(Exception, match="told to fail"):
            await world.publish(4)
    claim(world, (2, 0))
    assert (await world.publish(8)).version.order == (2, 8)
    assert (await world.publish(9)).version.order == (2, 9)


@pytest.mark.parametrize("order", [FIRST, MOST, ((1 << 30) + 1, (1 << 62) + 1)])
@virtual
async def test_a_claim_that_leaves_no_room_for_later_numbers_is_ignored(order: tuple[int, int]) -> None:
    world = World()
    claim(world, order)
    for rank in range(2):
        add(world, rank, new_epoch=False)
    assert (await world.publish(0)).version.order == (1, 0)


@virtual
async def test_a_claim_ends_with_its_claimant_which_the_error_names() -> None:
    """Coordinator and trainer have both started again: what engines say may be true, and is all that is known."""
    world = World()
    claim(world, (1, 440))
    for rank in range(2):
        add(world, rank, new_epoch=False)
    with pytest.raises(
        VersionError, match=r"last one is 440.*Only thief/0 reports it.*`weightsync revoke thief/0`.*new_epoch=True"
    ):
        await world.publish(8)
    world.coordinator.revoke("thief/0")
    assert (await world.publish(8)).version.order == (1, 8)


@pytest.mark.parametrize("order", [FIRST, MOST, (1, 1 << 62), (1 << 30, 0)])
@virtual
async def test_what_a_usurper_of_a_trainer_rank_claims_ends_with_it(order: tuple[int, int]) -> None:
    world = World()
    add(world, 0, new_epoch=False, epoch=1, published=7)
    usurper = add(world, 1, new_epoch=False, epoch=order[0], published=order[1])
    usurper.disconnect()
    add(world, 1, new_epoch=False, epoch=1, published=7)
    assert (await world.publish(8)).version.order == (1, 8)


@virtual
async def test_a_number_that_was_placed_for_a_coordinator_that_died_is_not_used_again() -> None:
    """The call of rank 0 was interrupted after version 6 was placed, and engines may serve it."""
    world = World()
    for rank in range(2):
        add(world, rank, new_epoch=False, epoch=1, published=5)
    asked = [world.coordinator.publish(f"trainer/{rank}", Publish(above=above), 60.0) for rank, above in enumerate((6, 5))]
    assert [result.version.number for result in await asyncio.gather(*asked)] == [7, 7]


@virtual
async def test_a_coordinator_whose_clock_is_behind_goes_on_from_the_placings_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise ranks that take maxima together would take a new placing for one that they gave up."""
    world = world_of(2, r=1)
    await world.publish(1)
    before = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: before - 3600 * 10**9)
    restart(world)
    await world.publish(2)
    for trainer in world.trainers.values():
        first, second = (asked.order for asked in trainer.asked)
        assert second > first
    await world.coordinator.aclose()


@virtual
async def test_a_number_whose_bytes_an_earlier_trainer_told_is_skipped() -> None:
    """It left, its claim with it, and the next one met the number again and again: every publication failed there."""
    world = World()
    earlier = TrainerProcess(world, 0, 1, MANIFEST, world.session(), 2)
    earlier.last = Version("test", 2, MANIFEST.fingerprint, "ab" * 8)
    earlier.connect()
    earlier.disconnect()
    world.add_trainers(1)
    world.add_replica("r0")
    numbers = []
    for call in range(1, 4):
        answer = await world.coordinator.publish("trainer/0", Publish(None, call=call, count=call), 60.0)
        assert answer.ok
        assert answer.version is not None
        numbers.append(answer.version.number)
    assert numbers == sorted(set(numbers))
    assert 2 not in numbers
