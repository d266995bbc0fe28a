"""Holds that ranks which publish adapters under several names count all their calls together, as their processes do."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from msgspec import structs
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, SPECS, rows_layout
from tests.unit.coordinator.fakes import HOST, World
from tests.virtual_time import virtual

from weightsync.coordinator.agent_messages import answer_agent
from weightsync.coordinator.ranks import AdapterRank
from weightsync.errors import ConfigurationError, DeadlineExceeded, ManifestMismatch, RoundFailed, WeightSyncError
from weightsync.model import Manifest
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.messages import Body, Offer, Traits
from weightsync.trainer.requests import PublishRequests

_sessions = itertools.count()
OTHER = Manifest(SPECS[:2])


class Publisher:
    """One of two ranks, and its process's requests."""

    def __init__(self, world: World, rank: int, count: int = 0, manifest: Manifest = MANIFEST) -> None:
        self.world, self.calls, self.requests = world, itertools.count(1), PublishRequests(None)
        hello = said(
            "adapters:1", rank, 2, HOST, session=f"s{next(_sessions)}", offers=(Offer("memory", "x", HOST, Traits()),),
            count=count, epoch=int(count > 0),
        )  # fmt: skip
        self.rank = AdapterRank(structs.replace(hello, role="adapters"), manifest, rows_layout(manifest, rank, 2))
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
        number: int | None = None,
    ) -> asyncio.Task[None]:
        async def publish() -> None:
            asked = structs.replace(self.requests.make(number, None, None), call=next(self.calls))
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


@pytest.mark.parametrize("waits", [False, True])
@virtual
async def test_ranks_with_other_shapes_hear_of_it_at_once_and_are_in_step_afterwards(waits: bool) -> None:
    """The second rank was refused while it was made, and the first waited for it until its deadline."""
    world, loop = World(), asyncio.get_running_loop()
    first, why = Publisher(world, 0), "(?s)of a/x was not published: adapters:1/1, unlike adapters:1/0, .* missing: c"
    waiting = [first.publish("a/x", ManifestMismatch, why)] if waits else []
    await asyncio.sleep(1)
    with pytest.raises(ManifestMismatch, match="adapters:1/1, unlike adapters:1/0"):
        Publisher(world, 1, manifest=OTHER)
    await asyncio.gather(*(waiting or [first.publish("a/x", ManifestMismatch, why)]))
    second = Publisher(world, 1)
    for name in ("a/x", "b/x"):
        await asyncio.gather(first.publish(name), second.publish(name))
    assert loop.time() < 5


@virtual
async def test_what_was_refused_is_over_when_the_ranks_have_left() -> None:
    world = World()
    first = Publisher(world, 0)
    with pytest.raises(ManifestMismatch):
        Publisher(world, 1, manifest=OTHER)
    world.coordinator.leave(first, "killed")
    first = Publisher(world, 0, manifest=OTHER)
    waits = first.publish("a/x")
    await asyncio.sleep(1)
    await asyncio.gather(waits, Publisher(world, 1, manifest=OTHER).publish("a/x"))


@pytest.mark.parametrize(("number", "what"), [(None, "the next version"), (3, "version 3")])
@virtual
async def test_a_rank_that_does_not_come_is_named_with_the_adapter_and_its_version(number: int | None, what: str) -> None:
    world = World()
    first, second = (Publisher(world, rank) for rank in (0, 1))
    why = f"{what} of a/x was not published: trainer rank 1 did not call publish"
    await first.publish("a/x", DeadlineExceeded, why, number)
    await second.publish("a/x", DeadlineExceeded, why, number)
    await asyncio.gather(first.publish("a/x", number=number), second.publish("a/x", number=number))
