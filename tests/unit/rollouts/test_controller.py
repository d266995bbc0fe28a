"""Holds the rollout controller: interruption, death, pause, timeouts, spreading, staleness, age, batches; nothing wakes it idle."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator

import pytest
from tests.unit.rollouts.engines import Engine, Engines, status

from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, VersionError
from weightsync_rollouts import Generate, RolloutController, Rollouts, RolloutSettings, Sample, Sampling, Task

SECONDS = 20.0


def task(tokens: int = 3) -> Task[Sample]:
    async def run(generate: Generate) -> Sample:
        return await generate([0], Sampling(max_tokens=tokens))

    return run


def controller(engines: Engines, **settings: float) -> RolloutController[Sample]:
    wish = {"batch": 1, "max_staleness": 0, "max_concurrent": 8, "task_seconds": SECONDS} | settings
    return RolloutController(RolloutSettings(**wish), engines, {name: f"http://{name}" for name in engines.engines})  # type: ignore[arg-type]


async def until(there: Callable[[], bool]) -> None:
    """Let the loop run until something is so; everything here happens on it, without any real time."""
    async with asyncio.timeout(SECONDS):
        while not there():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0)


async def test_a_pause_in_the_middle_keeps_the_tokens_and_goes_on_with_the_rest() -> None:
    one = Engine(1)
    async with controller(Engines({"a": one})) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task(5))
        one.permits.release()
        one.permits.release()
        await until(lambda: one.made == 2)
        rollouts.replicas.pausing("a")
        one.abort.set()
        await until(lambda: one.running == 0)
        await asyncio.sleep(0.12)  # a held replica's time is over: it is still paused, and is not asked
        assert len(one.asked) == 1
        one.abort.clear()
        one.version = 2
        rollouts.replicas.apply(status(2, a=2))
        for _ in range(3):
            one.permits.release()
        (rollout,) = await rollouts.batch(SECONDS)
    assert one.asked == [([0], 5), ([0, 1, 2], 3)]  # the tokens so far are part of the prompt, and of the budget
    assert rollout.value.tokens == [1, 2, 3, 4, 5]
    assert rollout.value.logprobs == [-0.5, -1.0, -1.5, -2.0, -2.5]
    assert rollout.value.versions == [1, 1, 2, 2, 2]
    assert (rollout.value.interruptions, rollout.oldest, rollout.value.finish_reason) == (1, 1, "length")


async def test_an_abort_that_was_told_of_before_is_gone_on_with_at_once() -> None:
    one = Engine(1)
    async with controller(Engines({"a": one})) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task(1))
        await until(lambda: one.running == 1)
        rollouts.replicas.apply(status(2, a=2))  # the round is over for whoever listens to the coordinator ...
        one.abort.set()  # ... before the abort arrives here
        await until(lambda: one.running == 0)
        one.abort.clear()
        await until(lambda: len(one.asked) == 2)
        one.permits.release()
        await rollouts.batch(SECONDS)


async def test_a_server_that_dies_in_the_middle_hands_over_to_another() -> None:
    engines = {"a": Engine(3), "b": Engine(3)}
    async with controller(Engines(engines)) as rollouts:
        rollouts.publish(3)
        rollouts.replicas.apply(status(3, a=3))
        rollouts.submit(task(4))
        engines["a"].permits.release()
        await until(lambda: engines["a"].made == 1)
        engines["a"].dead = True
        engines["a"].permits.release()
        await until(lambda: engines["a"].running == 0)
        for _ in range(3):
            engines["b"].permits.release()
        rollouts.replicas.apply(status(3, b=3))
        (rollout,) = await rollouts.batch(SECONDS)
        assert rollout.value.replicas == ["a", "b", "b", "b"]
        assert rollout.value.tokens == [1, 2, 3, 4]
        assert "a" not in rollouts.counts().replicas or rollouts.counts().replicas["a"] == 0


async def test_a_dead_server_of_which_nobody_tells_is_asked_again_less_and_less_often() -> None:
    one = Engine(1)
    one.dead = True
    async with controller(Engines({"a": one})) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task(1))
        await asyncio.sleep(0.5)
        assert 2 <= len(one.asked) <= 5  # after 0, 50, 150, 350 ms
        one.dead = False
        one.permits.release()
        rollouts.replicas.apply(status(2, a=2))  # news: at once
        await rollouts.batch(SECONDS)


async def test_a_task_that_times_out_is_cancelled_on_its_replica_and_frees_its_slot() -> None:
    one = Engine(1)
    async with controller(Engines({"a": one}), max_concurrent=1, task_seconds=0.1) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(task(3))
        await until(lambda: one.cancelled == 1)
        assert one.running == 0
        await until(lambda: rollouts.counts().running == 0)
        assert rollouts.counts().timed_out == 1
        assert rollouts.admission.capacity == 1
        rollouts.submit(task(1))
        one.permits.release()
        assert (await rollouts.batch(SECONDS))[0].value.tokens == [1]


async def test_requests_go_to_the_least_loaded_replica_and_only_to_those_that_serve() -> None:
    engines = {name: Engine(1) for name in "abc"}
    async with controller(Engines(engines), max_concurrent=8, batch=8) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1, b=1, c=None))
        for _ in range(6):
            rollouts.submit(task())
        await until(lambda: sum(engine.running for engine in engines.values()) == 6)
        assert [engines[name].running for name in "abc"] == [3, 3, 0]
        rollouts.replicas.apply(status(1, a=1, b=1, c=1))
        for _ in range(2):
            rollouts.submit(task())
        await until(lambda: engines["c"].running == 2)


async def test_only_a_move_pauses_admission() -> None:
    """Replicas in the round take nothing; others do. A trainer that is busy elsewhere changes nothing."""
    engines = {name: Engine(1) for name in "ab"}
    async with controller(Engines(engines, free=True), batch=1, max_staleness=16) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1, b=1))
        rollouts.replicas.pausing("a")
        rollouts.submit(task())
        await rollouts.batch(SECONDS)
        assert (len(engines["a"].asked), len(engines["b"].asked)) == (0, 1)
        rollouts.replicas.pausing("b")
        rollouts.submit(task())
        with pytest.raises(DeadlineExceeded, match="0 of 1"):
            await rollouts.batch(0.05)
        assert (rollouts.counts().running, rollouts.counts().waiting) == (0, 1)
        rollouts.replicas.apply(status(1, a=1, b=None))
        await rollouts.batch(SECONDS)
        with rollouts.paused():
            rollouts.submit(task())
            with pytest.raises(DeadlineExceeded):
                await rollouts.batch(0.05)
        await rollouts.batch(SECONDS)
        with pytest.raises(ConfigurationError):
            rollouts.resume()


async def test_tasks_are_taken_only_as_staleness_allows() -> None:
    taken = 0

    def tasks() -> Iterator[Task[Sample]]:
        nonlocal taken
        while True:
            taken += 1
            yield task()

    for eta in (0, 1, 4):
        taken = 0
        async with controller(Engines({"a": Engine(10)}, free=True), batch=4, max_staleness=eta, max_concurrent=3) as rollouts:
            rollouts.replicas.apply(status(10, a=10))
            rollouts.feed(tasks())
            assert taken == 0  # no version, no rollouts
            rollouts.publish(10)
            await until(lambda: rollouts.counts().running == 0 == rollouts.admission.capacity)
            assert taken == (eta + 1) * 4
            assert len(await rollouts.batch(SECONDS)) == 4
            rollouts.publish(12)
            await until(lambda: rollouts.counts().running == 0 == rollouts.admission.capacity)
            assert taken == (eta + 3) * 4


async def test_rejected_and_too_old_rollouts_make_room() -> None:
    verdicts = iter([None, 1, None, 2, 3, 4, 5, 6, 7, 8])

    async def scored(generate: Generate) -> int | None:
        await generate([0], Sampling(max_tokens=1))
        return next(verdicts)

    def scorers() -> Iterator[Task[int]]:
        while True:
            yield scored

    one = Engine(1)
    engines = Engines({"a": one}, free=True)
    settings = RolloutSettings(batch=2, max_staleness=1, max_age=1, max_concurrent=1)
    async with RolloutController[int](settings, engines, {"a": "http://a"}) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.feed(scorers())
        assert [rollout.value for rollout in await rollouts.batch(SECONDS)] == [1, 2]
        await until(lambda: rollouts.counts().ready == 2)
        assert rollouts.counts().rejected == 2
        one.version = 3
        rollouts.publish(3)  # 3 and 4 were made by version 1: dropped, others are made in their place
        assert [rollout.value for rollout in await rollouts.batch(SECONDS)] == [5, 6]
        assert rollouts.counts().too_old == 2


async def test_whoever_waits_for_a_batch_hears_of_errors_and_of_the_end() -> None:
    async def broken(generate: Generate) -> Sample:
        raise ZeroDivisionError("in a reward")

    async with controller(Engines({"a": Engine(1)}, free=True), batch=2) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        rollouts.submit(broken)
        with pytest.raises(ZeroDivisionError):
            await rollouts.batch(SECONDS)
        assert rollouts.counts().running == 0
        rollouts.submit(task())
        with pytest.raises(Aborted, match="only 1 of 2"):
            await rollouts.batch(SECONDS)
        waiting = asyncio.ensure_future(rollouts.batch(SECONDS))
        rollouts.submit(task())
        assert len(await waiting) == 2
        rollouts.publish(2)
    with pytest.raises(Aborted):
        await rollouts.batch(SECONDS)
    with pytest.raises(Aborted):
        rollouts.submit(task())


async def test_closing_cancels_on_the_replicas() -> None:
    one = Engine(1)
    async with controller(Engines({"a": one}), batch=4) as rollouts:
        rollouts.publish(1)
        rollouts.replicas.apply(status(1, a=1))
        for _ in range(4):
            rollouts.submit(task())
        await until(lambda: one.running == 4)
    assert (one.running, one.cancelled) == (0, 4)


def test_synchronous_face() -> None:
    def make() -> RolloutController[Sample]:
        made = controller(Engines({"a": Engine(5)}, free=True), batch=2)
        made.replicas.apply(status(5, a=5))
        return made

    with Rollouts(make) as rollouts:
        rollouts.feed(task() for _ in range(4))
        with pytest.raises(DeadlineExceeded):
            rollouts.batch(0.01)
        rollouts.publish(5)
        assert [rollout.value.versions for rollout in rollouts.batch(SECONDS)] == [[5, 5, 5], [5, 5, 5]]
        with rollouts.paused():
            assert rollouts.counts().paused
        rollouts.publish(6)
        assert len(rollouts.batch(SECONDS)) == 2
    with pytest.raises(Aborted):
        rollouts.counts()
    rollouts.close()


class _Counting(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.wakes += 1
        return found


def test_an_idle_controller_never_wakes() -> None:
    """Tasks wait for capacity, a request waits for a replica, the trainer waits for a batch: the loop turns for none of them."""
    selector = _Counting()

    async def idle() -> tuple[int, int]:
        one = Engine(1)
        async with controller(Engines({"a": one}), batch=2) as rollouts:
            rollouts.publish(1)
            rollouts.replicas.apply(status(1, a=1))
            for _ in range(4):
                rollouts.submit(task(1))
            waiting = asyncio.ensure_future(rollouts.batch(SECONDS))
            await until(lambda: one.running == 2)
            rollouts.replicas.pausing("a")
            one.abort.set()
            await until(lambda: one.running == 0)
            await asyncio.sleep(0.01)
            before = selector.wakes
            await asyncio.sleep(0.6)
            idled = selector.wakes - before
            waiting.cancel()
            return idled, len(one.asked)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        wakes, asked = runner.run(idle())
    assert asked == 2
    assert wakes <= 2  # the test's own sleep


async def test_admission_counts_from_the_oldest_version_that_a_request_could_meet() -> None:
    """A version that is placed is not served yet, and replicas take it one after another."""
    async with controller(Engines({"a": Engine(5), "b": Engine(5)}, free=True), batch=2, max_staleness=1) as rollouts:
        rollouts.feed(task(1) for _ in range(100))
        accepted = []
        for news in (status(5, a=5, b=5), status(6, a=5, b=5), status(6, a=5), status(6, a=6, b=5), status(6, a=6, b=6)):
            rollouts._status_changed(news)
            await until(lambda: rollouts.counts().running == 0 == rollouts.admission.capacity)
            accepted.append(rollouts.counts().accepted)
        assert accepted == [4, 4, 4, 4, 6]


async def test_replicas_that_are_too_old_for_the_bound_are_left_alone() -> None:
    engines = {"a": Engine(5), "b": Engine(7)}
    async with controller(Engines(engines, free=True), batch=4, max_staleness=1) as rollouts:
        rollouts.feed(task(1) for _ in range(100))
        rollouts._status_changed(status(7, a=5, b=7))
        await until(lambda: rollouts.counts().accepted == 8)
        rollouts._status_changed(status(7, a=6, b=7))  # admitted by version 7: one that comes back with 6 is not asked either
        await until(lambda: rollouts.counts().running == 0 == rollouts.admission.capacity)
        assert (len(engines["a"].asked), len(engines["b"].asked)) == (0, 8)
        with pytest.raises(VersionError, match="version decreased"):
            rollouts._status_changed(status(4, a=4, b=4))
            await rollouts.batch(SECONDS)


async def test_the_trainers_own_version_decides_what_is_too_old() -> None:
    """A trainer that publishes without waiting is ahead of what is served; a rollout that was overtaken is not given to it."""
    one = Engine(1)
    async with controller(Engines({"a": one}, free=True), batch=2, max_staleness=2, max_age=2) as rollouts:
        rollouts.feed(task(1) for _ in range(100))
        rollouts._status_changed(status(1, a=1))
        await until(lambda: rollouts.counts().ready == 6)
        assert [rollout.oldest for rollout in await rollouts.batch(SECONDS, 3)] == [1, 1]
        one.version = 3
        asking = asyncio.ensure_future(rollouts.batch(SECONDS, 4))
        await until(lambda: rollouts.counts().too_old == 4)
        assert [rollout.oldest for rollout in await asking] == [3, 3]
