"""Ranks that publish adapters and engine ranks that take them, in this process, with every call open to a test's wishes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec import structs
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, row_digests, rows_layout
from tests.unit.coordinator.fakes import HOST, World

from weightsync.coordinator.agent_messages import answer_agent
from weightsync.coordinator.ranks import AdapterRank, EngineRank, known_as
from weightsync.model import Layout, Version
from weightsync.model.lora import AdapterSpec, LoraConfig, LoraSlots, adapter_label
from weightsync.protocol.lora_messages import (
    DropLora,
    HeldLora,
    PrepareLora,
    RegisterLora,
    Retired,
    RetireLora,
    StageLora,
)
from weightsync.protocol.messages import (
    Body,
    CannotPublish,
    Done,
    Moved,
    Offer,
    Place,
    Placed,
    Prepared,
    Publish,
    Published,
    RoundResult,
    Traits,
)

NAME = "alice/math"
_sessions = itertools.count()
_LAYOUT = rows_layout(MANIFEST, 0, 1)


def spec_of(name: str = NAME, base: Version | None = None) -> AdapterSpec:
    return AdapterSpec(name, LoraConfig(2, 4.0), base, "keep")


async def _at_once(body: Body) -> None:
    pass


class _Rank:
    """``before`` is awaited before a call takes effect. It may wait or raise."""

    rank: Any

    def __init__(self, world: World) -> None:
        self.world = world
        self.before: Callable[[Body], Awaitable[None]] = _at_once
        self.calls: list[Body] = []
        self.dismissed: list[str] = []

    def dismiss(self, reason: str) -> None:
        self.dismissed.append(reason)

    def notify(self, text: str) -> None:
        pass

    def leave(self, *, clean: bool = True) -> None:
        self.world.coordinator.leave(self, "left", clean)

    async def call(self, body: Body, timeout: float) -> Body:
        raise NotImplementedError


class LonePublisher(_Rank):
    """The only rank of a source. Version ``n`` of what it publishes has the bytes ``content``."""

    def __init__(self, world: World, source: str, content: int = 1, limits: str = "", session: str = "") -> None:
        super().__init__(world)
        self.content, self._calls = content, itertools.count(1)
        self.base: Version | None = None
        offers = (Offer("memory", "x", HOST, Traits()),)
        hello = said(f"adapters:{source}", 0, 1, HOST, session=known_as(session or f"p{next(_sessions)}"), offers=offers)
        self.rank = AdapterRank(structs.replace(hello, role="adapters"), MANIFEST, _LAYOUT, limits)
        world.coordinator.loras.join(self).confirmed = True

    async def call(self, body: Body, timeout: float) -> Body:
        assert isinstance(body, Place)
        await self.before(body)
        return Placed(row_digests(_LAYOUT, np.full(len(_LAYOUT), self.content)).astype("<u8").tobytes(), 0.0)

    async def ask(self, body: Body, timeout: float = 30.0) -> Body:
        return await answer_agent(self.world.coordinator, self.rank)(body, timeout)

    async def publish(self, name: str = NAME, number: int | None = None, timeout: float = 30.0) -> RoundResult:
        call = next(self._calls)
        answer = await self.ask(Publish(number, call, count=call, adapter=spec_of(name, self.base)), timeout)
        assert isinstance(answer, Published)
        return answer.result

    async def cannot(self, name: str) -> None:
        await self.ask(CannotPublish(None, "Aborted", "x", count=next(self._calls), adapter=name))

    async def retire(self, name: str = NAME, keep: int = 1) -> Retired:
        answer = await self.ask(RetireLora(name, keep))
        assert isinstance(answer, Retired)
        return answer


class LoraEngine(_Rank):
    """A rank of a replica that takes adapters. ``place`` is its number, and that of all ranks."""

    def __init__(
        self,
        world: World,
        name: str,
        served: dict[str, Version] | None = None,
        before: Callable[[Body], Awaitable[None]] = _at_once,
        place: tuple[int, int] = (0, 1),
        **more: Any,
    ) -> None:
        super().__init__(world)
        self.before, self._place = before, place
        self.served = dict(served or {})
        self._specs: dict[str, AdapterSpec] = {}
        self._name, self._more = name, more
        self._prepared: PrepareLora | None = None
        self.join()

    def join(self) -> None:
        """Connect, or reconnect as the same process."""
        held = tuple(HeldLora(version, self._specs.get(label, spec_of(version.run))) for label, version in self.served.items())
        hello = said(
            self._name, *self._place, HOST, session=f"e{next(_sessions)}", transports=("memory",), delivery="auto", bucket_bytes=64,
            adapter="fake", lora_slots=LoraSlots(100, 16), loras=held, **self._more,
        )  # fmt: skip
        self.rank = EngineRank(hello, MANIFEST, _LAYOUT, None)
        self.world.coordinator.join_engine(self)
        self.world.coordinator.link_of(self.rank.member).confirmed = True

    @property
    def known(self) -> set[str]:
        """Labels that the coordinator says it serves."""
        return {f"{one.name}@{one.version}" for one in self.world.coordinator.loras.status() if self._name in one.replicas}

    async def call(self, body: Body, timeout: float) -> Body:
        self.calls.append(body)
        async with asyncio.timeout(timeout):
            await self.before(body)
            return self._answer(body)

    def _answer(self, body: Body) -> Body:
        match body:
            case PrepareLora():
                self._prepared = body
                return Prepared(body.plan.digest, ("memory",))
            case StageLora():
                assert self._prepared is not None
                plan = self._prepared.plan
                layout = Layout.from_columns(MANIFEST, plan.layout)
                (source,) = plan.sources
                publisher: Any = self.world.coordinator.link_of(source.member).node
                digests = row_digests(layout, np.full(len(layout), publisher.content))
                return Moved(plan.nbytes, digests.astype("<u8").tobytes(), 0, 0, 0, "installed")
            case RegisterLora(version=version):
                label = adapter_label(version.run, version.number)
                self.served[label] = version
                assert self._prepared is not None
                self._specs[label] = self._prepared.spec
            case DropLora(name=name, numbers=numbers):
                for number in numbers:
                    self.served.pop(adapter_label(name, number), None)
        return Done()
