"""Holds that ranks which publish adapters under several names count all their calls together, as their processes do."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from msgspec import structs
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, rows_layout
from tests.unit.coordinator.fakes import HOST, World
from tests.virtual_time import virtual

from weightsync.coordinator.agent_messages import answer_agent
from weightsync.coordinator.ranks import AdapterRank
from weightsync.errors import ConfigurationError, RoundFailed, WeightSyncError
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.messages import Body, Offer, Traits
from weightsync.trainer.requests import PublishRequests

_sessions = itertools.count()


class Publisher:
    """One of two ranks, and its process's requests."""

    def __init__(self, world: World, rank: int, count: int = 0) -> None:
        self.world, self.calls, self.requests = world, itertools.count(1), PublishRequests(None)
        hello = said(
            "adapters:1", rank, 2, HOST, session=f"s{next(_sessions)}", offers=(Offer("memory", "x", HOST, Traits()),),
            count=count, epoch=int(count > 0),
        )  # fmt: skip
        self.rank = AdapterRank(structs.replace(hello, role="adapters"), MANIFEST, rows_layout(MANIFEST, rank, 2))
        link = world.coordinator.loras.join(self)
        link.confirmed = True
        self.requests.start_after(count or link.count)

    def dismiss(self, reason: str) -> None:
        raise AssertionError(reason)

    def notify(self, text: str) -> None:
        pass

    async def call(self, body: Body, timeout: float) -> Body:
        raise AssertionError("no engine takes adapters, so none is placed")

    def publish(
        self,
        name: str,
        error: type[WeightSyncError] = RoundFailed,
        why: str = "no engine that takes LoRA adapters is connected",
    ) -> asyncio.Task[None]:
        async def publish() -> None:
            asked = structs.replace(self.requests.make(None, None, None), call=next(self.calls))
            spec = AdapterSpec(name, LoraConfig(2, 4.0), None, "keep")
            with pytest.raises(error, match=why):
                await answer_agent(self.world.coordinator, self.rank)(structs.replace(asked, adapter=spec), 30.0)

        return asyncio.ensure_future(publish())


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("names", [["a/x"], ["a/x", "b/x"], ["b/x", "a/x"], ["a/x", "b/x", "a/x"]])
@virtual
async def test_a_rank_that_starts_again_joins_the_others_whatever_they_published_last(names: list[str], waits: bool) -> None:
    """It began with the last call under one of the names, or with the first. The others waited for it in vain."""
    world = World()
    first, second = (Publisher(world, rank) for rank in (0, 1))
    for name in names:
        await asyncio.gather(first.publish(name), second.publish(name))
    waiting = [first.publish("b/x")] if waits else []
    await asyncio.sleep(1)
    world.coordinator.leave(second, "killed")
    second = Publisher(world, 1)
    await asyncio.gather(second.publish("b/x"), *(waiting or [first.publish("b/x")]))
    await asyncio.gather(second.publish("a/x"), first.publish("a/x"))


@virtual
async def test_a_rank_that_starts_after_the_coordinator_was_restarted_joins_the_others() -> None:
    world = World()
    first = Publisher(world, 0, count=5)
    second = Publisher(world, 1)
    await asyncio.gather(second.publish("a/x"), first.publish("a/x"))


@virtual
async def test_ranks_that_publish_under_different_names_hear_of_it_at_once() -> None:
    """Each waited for the other until its deadline, and was told that the other did not call publish()."""
    world, loop = World(), asyncio.get_running_loop()
    first, second = (Publisher(world, rank) for rank in (0, 1))
    for mine, other in (("a/x", "b/x"), ("b/x", "a/x"), ("a/x", "b/x")):
        started, why = loop.time(), f"adapters:1/1 publishes {other}, adapters:1/0 {mine}. All ranks publish"
        waiting = first.publish(mine, ConfigurationError, why)
        await asyncio.sleep(1)
        await asyncio.gather(second.publish(other, ConfigurationError, why), waiting)
        assert loop.time() - started < 2
        await asyncio.gather(first.publish(mine), second.publish(mine))
