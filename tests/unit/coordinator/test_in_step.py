"""Holds that ranks which publish without numbers never make one version of two steps, and are in step again by themselves."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST, SPECS
from tests.unit.coordinator.fakes import TrainerProcess, World, world_of
from tests.virtual_time import virtual

from weightsync.coordinator.publish_barrier import RETURN_SECONDS, OutOfCount
from weightsync.coordinator.ranks import TrainerRank
from weightsync.errors import Aborted, DeadlineExceeded, ManifestMismatch, VersionError, WeightSyncError
from weightsync.model import Manifest
from weightsync.protocol.messages import Call, Publish, RoundResult, decode, encode
from weightsync.trainer.requests import PublishRequests

Asked = asyncio.Task[RoundResult]
_calls = itertools.count(1)


def ask(world: World, rank: int, count: int, *, number: int | None = None, step: int | None = None, above: int = -1) -> Asked:
    """The next call of a rank, which is its ``count``-th."""
    publish = world.coordinator.publish(f"trainer/{rank}", Publish(number, next(_calls), step, count=count, above=above), 60.0)
    return asyncio.ensure_future(publish)


async def number_of(*asked: Asked) -> int:
    (number,) = {result.version.number for result in await asyncio.gather(*asked)}
    return number


@virtual
async def test_ranks_that_fail_one_by_one_before_they_ask_are_in_step_again() -> None:
    world = world_of(2, r=1)
    for count in (1, 2):
        for rank in (0, 1):
            world.coordinator.cannot_publish(f"trainer/{rank}", None, "OSError: no room", None, count)
    assert await number_of(ask(world, 0, 3), ask(world, 1, 3)) == 0


@virtual
async def test_ranks_that_all_failed_before_they_ask_publish_the_number_again() -> None:
    """The first rank heard of the second one's failure, which was its own publication's, while the second one waited for it."""
    world = world_of(3, r=1)
    for rank in (0, 1, 2):
        world.coordinator.cannot_publish(f"trainer/{rank}", 7, "OSError: no room", None, 1)
    assert await number_of(*(ask(world, rank, 2, number=7) for rank in (0, 1, 2))) == 7


@virtual
async def test_a_rank_that_missed_failures_of_another_hears_of_them_one_by_one() -> None:
    world = world_of(2, r=1)
    for count in (1, 2):
        world.coordinator.cannot_publish("trainer/0", None, "OSError: no room", None, count)
    waits = ask(world, 0, 3)
    for count in (1, 2):
        with pytest.raises(Aborted, match="trainer/0 failed before it placed its shards: OSError: no room"):
            await ask(world, 1, count)
    assert await number_of(waits, ask(world, 1, 3)) == 0


@virtual
async def test_a_rank_that_gave_up_the_call_in_which_others_wait_says_so_and_waits_for_them() -> None:
    world = world_of(3, r=1)
    first, second = ask(world, 0, 1), ask(world, 1, 1)
    await asyncio.sleep(1)
    ahead = ask(world, 2, 2)
    for waited in (first, second):
        with pytest.raises(VersionError, match="differ: trainer/2 is at publication 2, trainer/0, trainer/1 at publication 1"):
            await waited
    assert not ahead.done()
    assert await number_of(ahead, ask(world, 0, 2), ask(world, 1, 2)) == 0


@virtual
async def test_a_rank_that_is_behind_is_refused_alone() -> None:
    world = world_of(2, r=1)
    waits = ask(world, 0, 2)
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match="trainer/1 is at publication 1, trainer/0 at publication 2"):
        await ask(world, 1, 1)
    world.coordinator.cannot_publish("trainer/1", None, "OSError: late", None, 1)
    await asyncio.sleep(1)
    assert not waits.done()
    assert await number_of(waits, ask(world, 1, 2)) == 0


@pytest.mark.parametrize("number", [None, 4])
@virtual
async def test_a_rank_that_was_interrupted_publishes_before_its_withdrawal_has_arrived(number: int | None) -> None:
    world = world_of(2, r=1)
    interrupted = ask(world, 0, 1, number=number)
    await asyncio.sleep(1)
    again = ask(world, 0, 2, number=number)
    await asyncio.sleep(0)
    interrupted.cancel()
    if number is None:
        with pytest.raises(WeightSyncError, match="trainer/0 was interrupted"):
            await ask(world, 1, 1)
    assert await number_of(again, ask(world, 1, 2, number=number)) == (number or 0)
    assert len(world.trainers["trainer/0"].asked) == 1


@virtual
async def test_another_number_after_an_interruption_is_no_difference_between_ranks() -> None:
    world = world_of(2, r=1)
    assert await number_of(ask(world, 0, 1, number=4), ask(world, 1, 1, number=4)) == 4
    interrupted = ask(world, 0, 2, number=5)
    await asyncio.sleep(1)
    again = ask(world, 0, 3, number=6)
    with pytest.raises(Aborted, match="trainer/0 was interrupted"):
        await interrupted
    assert await number_of(again, ask(world, 1, 3, number=6)) == 6


@virtual
async def test_a_step_is_what_is_published_and_the_count_tells_equal_ones_apart() -> None:
    world = world_of(2, r=1)
    assert await number_of(ask(world, 0, 1, step=5), ask(world, 1, 1, step=5)) == 0
    waits = ask(world, 0, 1, step=6)
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match=r"trainer/1 is at step 5 \(publication 2 of it\), trainer/0 at step 6"):
        await ask(world, 1, 2, step=5)
    assert await number_of(waits, ask(world, 1, 1, step=6)) == 1


@pytest.mark.parametrize(("number", "steps"), [(3, (5, 6)), (None, (5, None))])
@virtual
async def test_ranks_whose_steps_cannot_belong_together_are_refused(number: int | None, steps: tuple[int, int | None]) -> None:
    world = world_of(2, r=1)
    asked = [ask(world, rank, 1, number=number, step=step) for rank, step in enumerate(steps)]
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, VersionError)
        assert f"trainer/1 publishes {'the next version' if number is None else 'version 3'} with" in str(outcome)
    assert await number_of(*(ask(world, rank, 1, number=number, step=7) for rank in (0, 1))) == (number or 0)


@virtual
async def test_ranks_with_one_number_may_leave_the_step_to_one_of_them() -> None:
    world = world_of(2, r=1)
    assert await number_of(ask(world, 0, 1, number=3, step=5), ask(world, 1, 1, number=3)) == 3


@pytest.mark.parametrize("late", [False, True])
@virtual
async def test_a_trainer_that_starts_again_is_in_step(late: bool) -> None:
    """Its old ranks waited in a publication when they were killed; rank 0 asks ``late``, or while they keep their places."""
    world = world_of(2, r=1)
    for count in (1, 2, 3):
        await number_of(ask(world, 0, count), ask(world, 1, count))
    old = ask(world, 1, 4)
    await asyncio.sleep(1)
    old.cancel()
    for rank in (1, 0):
        world.trainers[f"trainer/{rank}"].disconnect()
    await asyncio.sleep(2 * RETURN_SECONDS if late else 1)
    world.add_trainer(0, 2)
    start = world.coordinator.link_of("trainer/0").count
    first = ask(world, 0, start + 1)
    await asyncio.sleep(1)
    world.add_trainer(1, 2)
    assert world.coordinator.link_of("trainer/1").count == start
    assert await number_of(first, ask(world, 1, start + 1)) == 3


@virtual
async def test_a_rank_that_starts_alone_joins_the_others_in_their_next_publication() -> None:
    world = world_of(2, r=1)
    await number_of(ask(world, 0, 1), ask(world, 1, 1))
    waits = ask(world, 0, 2)
    await asyncio.sleep(1)
    world.trainers["trainer/1"].disconnect()
    world.add_trainer(1, 2)
    assert await number_of(waits, ask(world, 1, world.coordinator.link_of("trainer/1").count + 1)) == 1
    waits = ask(world, 0, 3)
    await asyncio.sleep(1)
    world.coordinator.leave(world.trainers.pop("trainer/1").node, clean=True)
    with pytest.raises(DeadlineExceeded):
        await waits
    world.add_trainer(1, 2)
    assert await number_of(ask(world, 0, 4), ask(world, 1, world.coordinator.link_of("trainer/1").count + 1)) == 2


@virtual
async def test_a_rank_that_starts_late_does_not_join_a_later_publication() -> None:
    world = World()
    world.add_trainer(0, 2)
    with pytest.raises(DeadlineExceeded):
        await ask(world, 0, 1)
    waits = ask(world, 0, 2)
    await asyncio.sleep(1)
    world.add_trainer(1, 2)
    assert world.coordinator.link_of("trainer/1").count == 0
    with pytest.raises(WeightSyncError, match=r"trainer rank 1 \(not connected\) did not call publish"):
        await ask(world, 1, 1)
    assert await number_of(waits, ask(world, 1, 2)) == 0


@virtual
async def test_a_rank_with_other_tensors_fails_the_publication_of_all_others_at_once() -> None:
    world = World()
    world.add_trainer(0, 3)
    world.add_trainer(1, 3)
    waits = ask(world, 0, 1)
    await asyncio.sleep(1)
    with pytest.raises(ManifestMismatch):
        world.add_trainer(2, 3, Manifest(SPECS[:2]))
    for asked in (waits, ask(world, 1, 1)):
        with pytest.raises(ManifestMismatch, match="the next version was not published: trainer/2, unlike trainer/0, does not"):
            await asked
    world.add_trainer(2, 3)
    assert world.coordinator.link_of("trainer/2").count == 1
    assert await number_of(*(ask(world, rank, 2) for rank in range(3))) == 0
    assert asyncio.get_running_loop().time() < 5


@virtual
async def test_a_number_that_was_placed_here_and_not_served_is_used_again() -> None:
    world = world_of(2, r=1)
    assert await number_of(ask(world, 0, 1, above=6), ask(world, 1, 1, above=5)) == 0


@pytest.mark.parametrize("ranks", [2, 3])
@virtual
async def test_a_failure_is_not_raised_again_when_steps_repeat(ranks: int) -> None:
    world = world_of(ranks, r=1)
    early = [ask(world, rank, 1, step=3) for rank in range(ranks - 1)]
    for outcome in await asyncio.gather(*early, return_exceptions=True):
        assert isinstance(outcome, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        await ask(world, ranks - 1, 1, step=3)
    for number, step in enumerate((0, 1, 2, 3, 0, 3)):
        assert await number_of(*(ask(world, rank, 1, step=step) for rank in range(ranks))) == number


@virtual
async def test_a_failure_is_not_raised_again_after_a_publication() -> None:
    world = world_of(2, r=1)
    with pytest.raises(DeadlineExceeded):
        await ask(world, 0, 1, step=3)
    assert await number_of(*(ask(world, rank, 1, step=4) for rank in (0, 1))) == 0
    assert await number_of(*(ask(world, rank, 1, step=2) for rank in (0, 1))) == 1


@virtual
async def test_a_rank_with_a_number_does_not_join_an_earlier_publication() -> None:
    world = world_of(2, r=1)
    assert await number_of(ask(world, 0, 1, number=4), ask(world, 1, 1)) == 4
    waits = ask(world, 1, 2)
    await asyncio.sleep(1)
    ahead = ask(world, 0, 3, number=6)
    with pytest.raises(VersionError, match="trainer/0 is at publication 3, trainer/1 at publication 2"):
        await waits
    assert await number_of(ahead, ask(world, 1, 3)) == 6
    waits = ask(world, 0, 5, number=8)
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match="trainer/1 is at publication 4, trainer/0 at publication 5"):
        await ask(world, 1, 4)
    assert await number_of(waits, ask(world, 1, 5)) == 8


@virtual
async def test_a_number_without_a_step_is_not_a_step_without_a_number() -> None:
    world = world_of(2, r=1)
    asked = ask(world, 0, 1, number=4), ask(world, 1, 1, step=7)
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, VersionError)
        assert "give every rank the same step" in str(outcome)


@virtual
async def test_a_rank_that_starts_again_and_again_joins_the_others() -> None:
    """Although another rank that started alone has published nothing yet."""
    world = world_of(4, r=1)
    await number_of(*(ask(world, rank, 1) for rank in range(4)))
    for rank in (2, 3):
        world.coordinator.leave(world.trainers.pop(f"trainer/{rank}").node, clean=True)
    world.add_trainer(2, 4)
    start = world.coordinator.link_of("trainer/2").count
    for outcome in await asyncio.gather(*(ask(world, rank, start + 1) for rank in range(3)), return_exceptions=True):
        assert isinstance(outcome, DeadlineExceeded)
    waits = [ask(world, rank, start + 2) for rank in range(3)]
    await asyncio.sleep(1)
    world.add_trainer(3, 4)
    with pytest.raises(WeightSyncError):  # with which its program ends
        await ask(world, 3, world.coordinator.link_of("trainer/3").count + 1)
    world.coordinator.leave(world.trainers.pop("trainer/3").node, clean=True)
    world.add_trainer(3, 4)
    assert await number_of(*waits, ask(world, 3, world.coordinator.link_of("trainer/3").count + 1)) == 1


@virtual
async def test_the_largest_count_that_a_rank_claims_leaves_room_for_others() -> None:
    world = World()
    thief = TrainerProcess(world, 1, 2, MANIFEST, "thief", -1)
    honest = thief.make

    def claim() -> TrainerRank:
        rank = honest()
        return TrainerRank(structs.replace(rank.hello, count=(1 << 48) - 1), rank.manifest, rank.layout)

    thief.make = claim
    thief.connect()
    world.add_trainer(0, 2)
    requests = PublishRequests(None)
    requests.start_after(world.coordinator.link_of("trainer/0").count)
    call = Call(1, 1.0, requests.make(None, None, None))
    assert decode(encode(call)) == call


@virtual
async def test_a_rank_that_starts_late_begins_with_the_first_call_of_one_whose_coordinator_ended_in_it() -> None:
    """That rank goes on to its next step. Else both would publish halves of two steps as one version (schedule 2001866)."""
    world = World()
    early = TrainerProcess(world, 1, 2, MANIFEST, "early", -1)
    connecting = early.make

    def reconnecting() -> TrainerRank:
        rank = connecting()
        return TrainerRank(structs.replace(rank.hello, count=1), rank.manifest, rank.layout)

    early.make = reconnecting
    world.trainers["trainer/1"] = early
    early.connect()
    world.add_replica("r", 1)
    waits = ask(world, 1, 2)
    await asyncio.sleep(1)
    world.add_trainer(0, 2)
    start = world.coordinator.link_of("trainer/0").count
    with pytest.raises(VersionError, match="trainer/0 is at publication 1, trainer/1 at publication 2"):
        await ask(world, 0, start + 1)
    assert await number_of(waits, ask(world, 0, start + 2)) == 0


def a_new_process_and_an_old_one() -> World:
    """A coordinator that was restarted: a new process of rank 1 reached it first, and then rank 0, which has published before."""
    world = World()
    TrainerProcess(world, 1, 2, MANIFEST, "new", -1).connect()
    old = TrainerProcess(world, 0, 2, MANIFEST, "old", -1)
    connecting = old.make

    def reconnecting() -> TrainerRank:
        rank = connecting()
        return TrainerRank(structs.replace(rank.hello, epoch=1), rank.manifest, rank.layout)

    old.make = reconnecting
    old.connect()
    world.add_replica("r", 1)
    return world


@pytest.mark.parametrize("early", ["new", "old"])
@virtual
async def test_a_process_that_came_before_all_others_and_gives_a_step_is_not_told_another_count(early: str) -> None:
    """It asked again with the same step at once, until its deadline, and the others waited as long."""
    world = a_new_process_and_an_old_one()
    steps = [(1, 3), (0, 5)] if early == "new" else [(0, 5), (1, 3)]
    asked = {}
    for rank, step in steps:
        asked[rank] = ask(world, rank, 1, step=step)
        await asyncio.sleep(1)
    with pytest.raises(VersionError, match=r"trainer ranks differ.* at step 3") as refused:
        await asked[1]
    assert not isinstance(refused.value, OutOfCount)
    assert await number_of(asked[0], ask(world, 1, 1, step=5)) == 0


@virtual
async def test_a_process_that_came_before_all_others_is_told_the_count_of_its_step() -> None:
    world = a_new_process_and_an_old_one()
    requests = PublishRequests(None)
    again = ask(world, 0, 2, step=5)
    await asyncio.sleep(1)
    asked = requests.make(None, 5, None)
    with pytest.raises(OutOfCount) as others:
        await ask(world, 1, asked.count, step=5)
    asked = requests.count_on(asked, others.value.count)
    assert (asked.count, requests.count, requests.start) == (2, 0, 0)
    assert await number_of(again, ask(world, 1, asked.count, step=5)) == 0
    assert requests.make(None, 5, None).count == 3
