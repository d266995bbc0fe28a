"""Holds that a publication needs every trainer rank, with one number that goes up, and that nobody waits in vain."""

from __future__ import annotations

import asyncio
import re

import pytest
from tests.unit.coordinator.fakes import TrainerProcess, World
from tests.virtual_time import virtual

from weightsync.coordinator.publish_barrier import RETURN_SECONDS
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, RoundFailed, VersionError
from weightsync.model import PauseMode
from weightsync.protocol.messages import Publish, RoundResult


@virtual
async def test_twice_and_backwards() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await world.publish(4)
    for number in (4, 3):
        with pytest.raises(VersionError, match="last one is 4"):
            await world.publish(number)
    assert world.states() == {"r": ("loaded", 4)}
    assert (await world.publish(8)).ok
    assert world.state("r").staleness == 0


@virtual
async def test_differing_numbers_fail_everybody_who_asked() -> None:
    world = World()
    world.add_trainers(3)
    asking = [asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(1), 60.0)) for rank in (0, 1)]
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match="trainer/2 publishes version 2"):
        await world.coordinator.publish("trainer/2", Publish(2), 60.0)
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, VersionError)
    assert (await world.publish(2)).version.number == 2


@pytest.mark.parametrize("joined", [False, True])
@virtual
async def test_a_trainer_rank_that_never_comes_is_named(joined: bool) -> None:
    world = World()
    for rank in range(3 if joined else 2):
        world.add_trainer(rank, 3)
    world.add_replica("r")
    asking = [asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(1), 30.0)) for rank in (0, 1)]
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert asyncio.get_running_loop().time() == pytest.approx(30.0)
    for error in ended:
        assert isinstance(error, DeadlineExceeded)
        assert f"trainer rank 2{'' if joined else ' (not connected)'} did not call publish()" in str(error)
    assert world.states() == {"r": ("registered", None)}


def ask(world: World, rank: int, number: int | None = 1, timeout: float = 60.0, call: int = 0) -> asyncio.Task[RoundResult]:
    return asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(number, call), timeout))


def break_connection(world: World, rank: int, asked: asyncio.Task[RoundResult]) -> TrainerProcess:
    """As the service does it: calls are withdrawn, and the rank has left."""
    asked.cancel()
    process = world.trainers[f"trainer/{rank}"]
    process.disconnect()
    return process


@pytest.mark.parametrize("clean", [False, True])
@virtual
async def test_a_trainer_rank_lost_while_others_wait(clean: bool) -> None:
    world = World()
    world.add_trainers(3)
    asking = [ask(world, rank, timeout=30.0) for rank in (0, 1)]
    await asyncio.sleep(1)
    world.coordinator.leave(world.trainers["trainer/1"].node, clean=clean)
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, PeerLost)
        assert "trainer/1 is gone" in str(error)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0 if clean else 1.0 + RETURN_SECONDS)
    with pytest.raises(PeerLost):
        await ask(world, 2)  # which had not asked, and does not wait for anybody
    assert asyncio.get_running_loop().time() == pytest.approx(1.0 if clean else 1.0 + RETURN_SECONDS)


@pytest.mark.parametrize("noticed", ["before", "after"])
@virtual
async def test_a_trainer_rank_that_blinks_while_ranks_gather_keeps_its_place(noticed: str) -> None:
    world = World()
    world.add_trainers(3)
    world.add_replica("r")
    first, second = ask(world, 0), ask(world, 1)
    await asyncio.sleep(1)
    if noticed == "before":
        process = break_connection(world, 0, first)
        await asyncio.sleep(RETURN_SECONDS / 2)
        process.connect()
    else:
        old = world.trainers["trainer/0"].node
        world.trainers["trainer/0"].connect()
        first.cancel()
        world.coordinator.leave(old)
    await asyncio.sleep(0.01)
    assert not second.done()
    again = ask(world, 0)
    await asyncio.sleep(2 * RETURN_SECONDS)
    third = ask(world, 2)
    results = await asyncio.gather(again, second, third)
    assert results[0].ok
    assert results[0] == results[1] == results[2]


@virtual
async def test_all_ranks_are_waited_for_until_one_that_blinks_asks_again() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    first = ask(world, 0)
    await asyncio.sleep(1)
    process = break_connection(world, 0, first)
    second = ask(world, 1)
    await asyncio.sleep(1)
    assert not second.done()
    process.connect()
    await asyncio.sleep(1)
    assert not second.done(), "it has not asked on this connection"
    assert (await ask(world, 0)).ok
    assert (await second).ok


@virtual
async def test_after_a_restart_no_rank_waits_for_a_number_that_a_replica_turns_out_to_serve() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await world.publish(1)
    processes = [*world.trainers.values()]
    for process in processes:
        process.disconnect()
        process.placed = process.last = None  # the coordinator was killed before it told them the result
    (engine,) = world.replica("r")
    engine.disconnect()
    world.coordinator = World(world.settings).coordinator
    processes[0].connect()
    early = ask(world, 0, call=1)
    await asyncio.sleep(1)
    engine.connect()
    processes[1].connect()
    with pytest.raises(VersionError, match="last one is 1"):
        await ask(world, 1, call=1)
    with pytest.raises(VersionError, match="last one is 1"):
        await early
    assert asyncio.get_running_loop().time() < 5, "it did not wait for its deadline"
    results = await asyncio.gather(*(ask(world, rank, 2, call=2) for rank in (0, 1)))
    assert results[0].ok


@virtual
async def test_a_restarted_process_may_take_the_place_of_the_old_one() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    first = ask(world, 0)
    await asyncio.sleep(1)
    break_connection(world, 0, first)
    world.add_trainer(0, 2)
    both = ask(world, 0), ask(world, 1)
    assert all(result.ok for result in await asyncio.gather(*both))


@pytest.mark.parametrize("first", [True, False])
@virtual
async def test_a_rank_that_cannot_publish_says_so(first: bool) -> None:
    world = World()
    world.add_trainers(3)
    world.add_replica("r")
    asking = [] if first else [ask(world, 0), ask(world, 2)]
    await asyncio.sleep(1)
    world.coordinator.cannot_publish("trainer/1", 1, "ConfigurationError: other shards")
    asking += [ask(world, 0), ask(world, 2)] if first else []
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, Aborted)
        assert "trainer/1 failed before it placed its shards: ConfigurationError: other shards" in str(error)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)
    assert (await world.publish(1)).ok, "the number was not used"


@virtual
async def test_a_late_rank_hears_of_a_publication_that_failed_without_it() -> None:
    world = World()
    world.add_trainers(3)
    first = ask(world, 0, 7)
    await asyncio.sleep(1)
    with pytest.raises(VersionError, match="differ"):
        await ask(world, 1, 8)
    with pytest.raises(VersionError, match="differ"):
        await first
    with pytest.raises(VersionError, match="differ"):
        await ask(world, 2, 7)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)
    assert (await world.publish(8)).version.number == 8


@virtual
async def test_a_late_rank_meets_those_that_try_again() -> None:
    world = World()
    world.add_trainers(2)
    with pytest.raises(DeadlineExceeded):
        await ask(world, 0, 7, timeout=5.0)
    again = ask(world, 0, 7)
    await asyncio.sleep(1)
    late = ask(world, 1, 7)
    assert (await again).version == (await late).version
    with pytest.raises(DeadlineExceeded):
        await ask(world, 0, None, timeout=5.0)
    assert [result.version.number for result in await asyncio.gather(ask(world, 0, 9), ask(world, 1, 9))] == [9, 9]


@virtual
async def test_whoever_waits_is_told_for_whom() -> None:
    world = World()
    world.add_trainers(3)
    world.add_replica("r")
    world.delays["r/0", "move"] = 20.0
    asking = [ask(world, 0), ask(world, 1)]
    await asyncio.sleep(10)
    asking.append(ask(world, 2))
    await asyncio.gather(*asking)
    waiting = "waiting for trainer rank 2 to publish version 1"
    notices = world.trainers["trainer/0"].notices
    assert [text for _, text in notices[:3]] == [waiting, waiting, "waiting for the round of version 1: r"]
    assert [when for when, _ in notices[:3]] == pytest.approx([2.0, 6.0, 14.0])
    assert next(text for _, text in world.trainers["trainer/2"].notices) == "waiting for the round of version 1: r"


@virtual
async def test_a_quick_publication_says_nothing() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await world.publish(1)
    await asyncio.sleep(100)
    assert not world.trainers["trainer/0"].notices


@virtual
async def test_a_number_is_chosen() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    for number in (0, 1):
        results = await asyncio.gather(ask(world, 0, None), ask(world, 1, None))
        assert [result.version.number for result in results] == [number, number]
    results = await asyncio.gather(ask(world, 0, None), ask(world, 1, 7))
    assert [result.version.number for result in results] == [7, 7]
    with pytest.raises(VersionError, match=r"the last one is 7.*publish\(\) without a number.*new_epoch=True"):
        await world.publish(7)


@virtual
async def test_the_next_publication_is_not_taken_for_a_repeated_one() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    first, second = ask(world, 0, None, call=1), ask(world, 1, None, call=1)
    await asyncio.sleep(0.015)
    process = break_connection(world, 0, first)
    process.connect()
    assert (await second).version.number == 0
    assert (await ask(world, 0, 0, call=1)).version.number == 0
    results = await asyncio.gather(ask(world, 0, None, call=2), ask(world, 1, None, call=2))
    assert [result.version.number for result in results] == [1, 1]


@pytest.mark.parametrize("timeout", [4.0, 15.0, 60.0])
@virtual
async def test_a_round_gets_most_of_a_short_timeout(timeout: float) -> None:
    world = World()
    world.add_trainers(1)
    world.add_replica("r")
    await world.publish(1)
    world.delays["r/0", "move"] = 0.7 * timeout
    assert (await world.publish(2, timeout)).ok
    world.delays["r/0", "move"] = 2 * timeout
    result = await world.publish(3, timeout)
    assert not result.ok
    assert 0.7 * timeout < result.seconds < timeout


@virtual
async def test_a_cancelled_publisher_does_not_leave_the_others_waiting() -> None:
    world = World()
    world.add_trainers(3)
    first, second = (asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(1), 30.0)) for rank in (0, 1))
    await asyncio.sleep(1)
    first.cancel()
    with pytest.raises(Aborted, match="trainer/0 was interrupted before trainer rank 2 called"):
        await second
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)
    with pytest.raises(asyncio.CancelledError):
        await first


@virtual
async def test_a_trainer_rank_that_blinks_in_the_middle_of_a_round_gets_its_result() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    world.delays["r/0", "move"] = 20.0
    first, second = ask(world, 0, call=1), ask(world, 1, call=1)
    await asyncio.sleep(10)
    second.cancel()  # as the service does when the connection breaks
    old = world.trainers["trainer/1"].node
    world.trainers["trainer/1"].connect()
    world.coordinator.leave(old)
    again = await ask(world, 1, call=1)
    assert again.ok
    assert again == await first
    with pytest.raises(VersionError, match="last one is 1"):
        await ask(world, 1, call=2)
    with pytest.raises(asyncio.CancelledError):
        await second


@pytest.mark.parametrize("number", [1, None])
@virtual
async def test_an_answer_that_was_lost_is_given_again(number: int | None) -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    results = await asyncio.gather(*(ask(world, rank, number, call=1) for rank in (0, 1)))
    process = world.trainers["trainer/1"]
    process.disconnect()  # before the answer arrived
    process.connect()
    assert await ask(world, 1, results[0].version.number, call=1) == results[0]
    assert await ask(world, 1, results[0].version.number, call=1) == results[0], "lost a second time"
    after = await asyncio.gather(*(ask(world, rank, number and 2, call=2) for rank in (0, 1)))
    assert after[0].version.number == results[0].version.number + 1


@pytest.mark.parametrize("numbers", [(1, 1), (1, 2)])
@virtual
async def test_a_failure_whose_answer_was_lost_is_given_again(numbers: tuple[int, int]) -> None:
    world = World()
    world.add_trainers(3 if numbers == (1, 1) else 2)
    asking = [ask(world, rank, number, timeout=5.0, call=1) for rank, number in enumerate(numbers)]
    errors = await asyncio.gather(*asking, return_exceptions=True)
    ended = asyncio.get_running_loop().time()
    for rank, number in enumerate(numbers):
        process = world.trainers[f"trainer/{rank}"]
        process.disconnect()
        process.connect()
        with pytest.raises((DeadlineExceeded, VersionError)) as raised:
            await ask(world, rank, number, call=1)
        assert str(raised.value) == str(errors[rank])
    assert asyncio.get_running_loop().time() == ended


@virtual
async def test_a_new_trainer_process_does_not_get_the_result_of_the_old_one() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    world.delays["r/0", "move"] = 20.0
    first, second = (asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(1), 60.0)) for rank in (0, 1))
    await asyncio.sleep(10)
    second.cancel()
    world.trainers["trainer/1"].disconnect()
    world.add_trainer(1, 2)
    with pytest.raises(VersionError, match="last one is 1"):
        await world.coordinator.publish("trainer/1", Publish(1), 60.0)
    await asyncio.wait([first, second], timeout=60)
    world.check()


@pytest.mark.parametrize("windows", [0, 2])
@virtual
async def test_the_trainer_decides_what_a_pause_does_to_running_requests(windows: int) -> None:
    """The coordinator's setting is for a publication that names nothing, and a later re-seeding does as the publication did."""
    world = World(windows=windows)
    world.add_trainers(2)
    world.add_replica("one")
    world.add_replica("two", 2)
    await world.publish(1, mode="keep")
    assert world.modes == ["keep"] * 3
    if not windows:
        world.add_replica("late")
        await world.drain()
        assert world.states()["late"] == ("loaded", 1)
        assert world.modes == ["keep"] * 4
    world.modes.clear()
    await world.publish(2)
    assert set(world.modes) == {"abort"}
    await world.publish(3, mode="wait")
    assert "wait" in world.modes


@pytest.mark.parametrize("other", ["wait", None])
@virtual
async def test_differing_pause_modes_fail_every_rank_with_the_names_of_all(other: PauseMode | None) -> None:
    world = World()
    world.add_trainers(3)
    world.add_replica("r")
    asking = [
        asyncio.ensure_future(world.coordinator.publish(f"trainer/{rank}", Publish(1, pause_mode="keep"), 60.0)) for rank in (0, 1)
    ]
    await asyncio.sleep(1)
    asking.append(asyncio.ensure_future(world.coordinator.publish("trainer/2", Publish(1, pause_mode=other), 60.0)))
    named = rf"trainer/2 publishes with {other or 'no'} pause mode, trainer/0, trainer/1 with keep pause mode"
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, ConfigurationError)
        assert re.search(named, str(error))
    assert world.modes == []
    assert (await world.publish(1, mode="keep")).ok


@virtual
async def test_a_rank_that_had_not_asked_hears_that_the_pause_modes_of_others_differ() -> None:
    world = World()
    world.add_trainers(3)
    asking = [asyncio.ensure_future(world.coordinator.publish("trainer/0", Publish(1, pause_mode="keep"), 60.0))]
    asking.append(asyncio.ensure_future(world.coordinator.publish("trainer/1", Publish(1, pause_mode="abort"), 60.0)))
    await asyncio.sleep(1)
    asking.append(asyncio.ensure_future(world.coordinator.publish("trainer/2", Publish(1, pause_mode="keep"), 60.0)))
    for error in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(error, ConfigurationError)


@virtual
async def test_ranks_place_for_the_call_by_which_they_asked() -> None:
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    await asyncio.gather(ask(world, 0, call=7), ask(world, 1, call=3))
    await asyncio.gather(ask(world, 0, 2, call=8), ask(world, 1, 2, call=9))
    asked = [world.trainers[f"trainer/{rank}"].asked for rank in range(2)]
    assert [[place.call for place in places] for places in asked] == [[7, 8], [3, 9]]


@virtual
async def test_a_late_rank_does_not_join_those_that_try_again_without_a_number() -> None:
    """Rank 0 was interrupted, trained on and published again: what rank 1 brings is one step older."""
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    interrupted = ask(world, 0, None, call=1)
    await asyncio.sleep(1)
    interrupted.cancel()
    await asyncio.sleep(1)
    again = ask(world, 0, None, call=2)
    await asyncio.sleep(1)
    with pytest.raises(Aborted, match="trainer/0 was interrupted"):
        await ask(world, 1, None, call=1)
    assert not again.done()
    assert (await ask(world, 1, None, call=2)).version == (await again).version


@virtual
async def test_the_next_number_is_above_that_of_a_round_whose_rank_was_interrupted() -> None:
    world = World()
    world.add_trainers(1)
    world.add_replica("r")
    await ask(world, 0, None, call=1)
    world.delays["trainer/0", "place"] = 5.0
    interrupted = ask(world, 0, None, call=2)
    await asyncio.sleep(1)
    interrupted.cancel()
    await asyncio.sleep(1)
    assert (await ask(world, 0, None, call=3)).version.number == 2


@pytest.mark.parametrize("placed", [(True, False), (True, True), (False, False)])
@virtual
async def test_after_a_restart_a_version_is_of_the_calls_that_had_placed_it_or_of_none(placed: tuple[bool, bool]) -> None:
    """Rank 1 had placed version 3 when the coordinator died; rank 0 had not, or is in a later call already."""
    world = World()
    world.add_trainers(2)
    world.add_replica("r")
    publish = world.coordinator.publish
    asking = [publish(f"trainer/{rank}", Publish(None, 1, placed=3 if was else -1), 60.0) for rank, was in enumerate(placed)]
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    if len(set(placed)) > 1:
        for outcome in outcomes:
            assert isinstance(outcome, RoundFailed)
            assert "trainer/0 had placed it, trainer/1 had not" in str(outcome)
        assert not world.trainers["trainer/1"].asked
    else:
        assert [outcome.version.number for outcome in outcomes if isinstance(outcome, RoundResult)] == [3 if placed[0] else 0] * 2
