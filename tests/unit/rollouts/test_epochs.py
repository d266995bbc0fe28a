"""Holds that rollouts are ordered by epoch before number: what an abandoned branch of the training made is not used."""

from __future__ import annotations

import pytest
from tests.unit.rollouts.engines import Engine, Engines, status
from tests.unit.rollouts.test_controller import SECONDS, controller, task, until

from weightsync.errors import Aborted, ProtocolError, VersionError
from weightsync_rollouts import Chunk
from weightsync_rollouts.controller import Rollout
from weightsync_rollouts.generation import VllmTokens
from weightsync_rollouts.samples import Sample


async def test_a_new_epoch_begins_with_smaller_numbers() -> None:
    one, two = Engine(440), Engine(440)
    async with controller(Engines({"a": one, "b": two}, free=True), batch=2, max_concurrent=2) as rollouts:
        rollouts._status_changed(status(440, a=440, b=440))
        rollouts.submit(task())
        await until(lambda: rollouts.counts().ready == 1)
        rollouts._status_changed(status(400, epoch=2, a=(1, 440), b=(1, 440)))
        assert rollouts.counts().ready == 0, "made by weights that are no more"
        assert not rollouts.replicas.routable, "nobody serves the new epoch yet"
        assert rollouts.counts().too_old == 1
        one.version = two.version = 400
        rollouts._status_changed(status(400, epoch=2, a=(2, 400), b=(1, 440)))
        rollouts.feed(task() for _ in range(2))
        batch = await rollouts.batch(SECONDS)
        assert [rollout.oldest_first for rollout in batch] == [(2, 400)] * 2
        assert {name for rollout in batch for name in rollout.value.replicas} == {"a"}
        rollouts._status_changed(status(401, epoch=2, a=(2, 401)))
        assert rollouts.admission.version == 401


async def test_a_sample_that_an_older_epoch_began_is_dropped_when_it_is_whole() -> None:
    one = Engine(440)
    async with controller(Engines({"a": one}), batch=1) as rollouts:
        rollouts._status_changed(status(440, a=440))
        rollouts.submit(task(2))
        one.permits.release()
        await until(lambda: one.made == 1)
        one.abort.set()
        await until(lambda: one.running == 0)
        one.abort.clear()
        one.version = 7
        rollouts._status_changed(status(7, epoch=2, a=(2, 7)))
        one.permits.release()
        with pytest.raises(Aborted, match="no tasks are left"):
            await rollouts.batch(SECONDS)
        assert (rollouts.counts().too_old, rollouts.counts().accepted) == (1, 0)


async def test_an_older_epoch_is_a_step_back() -> None:
    async with controller(Engines({"a": Engine(1)}, free=True)) as rollouts:
        rollouts._status_changed(status(400, epoch=2, a=(2, 400)))
        rollouts._status_changed(status(440, epoch=1, a=(1, 440)))
        with pytest.raises(VersionError, match="epoch decreased"):
            await rollouts.batch(SECONDS)


def test_the_oldest_token_is_that_of_the_oldest_epoch() -> None:
    sample = Sample((1,))
    sample.keep("a", [Chunk((1,), None, (440,))])
    sample.keep("b", [Chunk((2, 3), None, (400, 401))], epoch=2)
    assert (sample.epochs, sample.oldest_first, sample.oldest) == ([1, 2, 2], (1, 440), 440)
    assert Rollout(1, "value", (sample,), 0.0).oldest_first == (1, 440)
    with pytest.raises(ProtocolError):
        sample.keep("c", [Chunk((4,), None, (402,), epochs=(2, 2))])


async def test_a_servers_labels_say_the_epoch() -> None:
    data = (
        b'{"choices": [{"token_ids": [1, 2], "weight_versions": [{"start": 0, "end": 1, "version": "run@440"},'
        b' {"start": 1, "end": 2, "version": "run.2@400"}]}]}'
    )
    async with VllmTokens() as vllm:
        chunk = vllm._chunk(data, "http://a")
    assert (chunk.versions, chunk.epochs) == ((440, 400), (1, 2))
