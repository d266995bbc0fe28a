"""Schedules in which adapters are published and retired beside the base weights, with faults at every step of it."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from tests.faults.points import LORA_POINTS
from tests.simulation.faults import Pending
from tests.simulation.loras import LORA, SPOILED, LoraMemory, Published
from tests.simulation.ranks import _SETTINGS, TrainerProcess
from tests.simulation.schedule import LAST_SECONDS, Schedule, _Publication
from tests.simulation.threads import Thread, threads
from tests.simulation.transfer import CORRUPTIONS
from tests.simulation.world import World

from weightsync.errors import WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Version
from weightsync.model.lora import LoraConfig
from weightsync.protocol.messages import RoundResult
from weightsync.trainer.adapters import Adapters, _AdapterPublisher
from weightsync.trainer.trainer_role import TrainerRole

__all__ = ["LORA_FAULTS", "LORA_STATES", "LoraSchedule", "with_adapters"]

_NAMES = ("alice/math", "bob/code")
_SHARE = 0.08
_KINDS = ("slow", "hang", "crash", "disconnect", "coordinator crash")
_IN_THE_ENGINE = ("lora.connect", "lora.begin", "lora.read", "stage_lora", "register_lora", "drop_lora")
_OF_PUBLISHERS = ("place", "trainer.received.place")
_OVERWRITTEN = "another driver writes the base"
LORA_FAULTS = (*LORA_POINTS, *_IN_THE_ENGINE, _OVERWRITTEN)
"""Moments of an adapter's publication at which something goes wrong."""


LORA_STATES = (
    *LORA_POINTS,
    "adapter published",
    "adapter refused by a replica",
    "adapter retired",
    "request for an adapter answered",
    "request for an adapter refused",
)


def with_adapters(seed: int) -> bool:
    """Whether adapters are published in the schedule of this seed."""
    return random.Random(f"adapters {seed}").random() < _SHARE


class LoraPublisher(TrainerProcess):
    """A rank that publishes adapters: the real :class:`~weightsync.Adapters` without its constructor."""

    def __init__(self, source: str, rank: int, ranks: int, world: World) -> None:
        self._class = _AdapterPublisher.of(source)
        super().__init__(world, rank, ranks, "", f"adapters:{source}")
        self.points = "lora."
        vars(self.trainer).update(_settings=_SETTINGS)
        self.adapters = Adapters.__new__(Adapters)
        vars(self.adapters).update(_origin=Origin(), _publisher=self.trainer, _config=LoraConfig(2, 4.0))

    def _make_memory(self) -> Any:
        return LoraMemory(self.rank, self.ranks)

    def _make_role(self) -> TrainerRole:
        return self._placing(TrainerRole)

    def _state(self) -> Any:
        return LORA, self.memory.shards

    def publish_adapter(self, content: int, number: int | None, timeout: float, after: float, told: Any) -> None:
        """Publish in a thread of this process, as :meth:`TrainerProcess.publish` does."""
        published = self.world.loras.published[content]
        self.publishing = True

        def run() -> None:
            world = self.world
            threads().sleep(after)
            self.stale = self.region.payload.copy()
            self.memory.fill(content, world.salt)
            vars(self.adapters).update(_base=published.base, _on_base_update="refuse" if published.refuses else "keep")
            started = world.loop.time()
            outcome: RoundResult | BaseException
            try:
                outcome = self.adapters.publish(published.name, number, timeout=timeout)
            except (WeightSyncError, TimeoutError) as error:
                outcome = error
            self.scribble()
            self.publishing = False
            told(self, outcome, world.loop.time() - started)

        Thread(run, f"{self.member} training", owner=self).start()

    def retire(self, name: str, keep: int, told: Any = lambda outcome: None) -> None:
        """Retire in a thread of this process."""

        def run() -> None:
            try:
                outcome: Any = self.adapters.retire(name, keep, timeout=20.0)
                self.world.seen["adapter retired"] += bool(outcome)
            except WeightSyncError as error:
                outcome = error
            told(outcome)

        Thread(run, f"{self.member} retiring", owner=self).start()


class _AdapterPublication(_Publication):
    """One version of an adapter, published by every rank of its source that lives."""

    def __init__(self, world: World, content: int, number: int | None, timeout: float) -> None:
        super().__init__(world, content, timeout, False)
        self.explicit = number

    def _begin(self, trainer: Any, number: int, after: float, told: Any) -> None:
        trainer.publish_adapter(number, self.explicit, self.timeout, after, told)

    def _note(self, outcome: Any) -> None:
        seen, loras = self.world.seen, self.world.loras
        if isinstance(outcome, RoundResult):
            seen["adapter published"] += 1
            failed = sum(one.error is not None for one in outcome.replicas)
            seen["adapter refused by a replica"] += failed > 0
            if loras.contents.setdefault(str(outcome.version), self.number) != self.number:
                self.world.violated("mislabelled", f"{outcome.version} is {loras.contents[str(outcome.version)]} and {self.number}")
        else:
            seen[f"publishing an adapter raised {type(outcome).__name__}"] += 1


class LoraSchedule(Schedule):
    """A schedule of base weights, beside which one or two sources publish two adapters."""

    later = LORA_FAULTS

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.misfit = False
        self.aside = random.Random(f"aside {seed}")
        self._sources = {
            name: source for name, source in zip(_NAMES, self.aside.choice((("one", "one"), ("one", "two"))), strict=True)
        }
        self._content = 0
        self._numbers = dict.fromkeys(_NAMES, 0)
        self._running: list[_AdapterPublication] = []

    def cast(self) -> None:
        super().cast()
        for source in sorted({*self._sources.values()}):
            ranks = self.aside.choice((1, 1, 2))
            for rank in range(ranks):
                self.world.start_publisher(partial(LoraPublisher, source, rank, ranks))

    def ranks_of(self, name: str) -> list[Any]:
        """Ranks that publish the adapter, and live."""
        source = f"adapters:{self._sources[name]}"
        return [one for one in self.world.publishers.values() if one.name == source and one.alive]

    def beside(self, engines: dict[str, str]) -> None:
        """See :meth:`Schedule.beside`."""
        aside, world = self.aside, self.world
        for _ in range(aside.choice((0, 1, 2, 3))):
            one = self._fault(list(engines))
            world.pending[one.member, one.point] = one
        for _ in range(aside.choice((0, 1, 2, 3))):
            at = aside.choice((0.0, aside.uniform(0.0, 0.12), aside.uniform(0.2, 5.0), aside.uniform(0.2, 5.0)))
            world.loop.call_later(at, self.publish_adapter, aside.choice(_NAMES), aside.choice((3.0, 12.0, 25.0)))
        for _ in range(aside.choice((0, 1, 3))):
            world.loop.call_later(aside.expovariate(1 / 1.0), self._ask)
        if aside.random() < 0.5:
            world.loop.call_later(aside.uniform(0.0, 5.0), self._retire, aside.choice(_NAMES), aside.choice((0, 1)))
        if aside.random() < 0.1:
            world.loop.call_later(aside.uniform(0.0, 1.0), self._overwrite)

    def _fault(self, members: list[str]) -> Pending:
        aside = self.aside
        seconds = aside.choice([aside.uniform(0.05, 2.0), aside.uniform(2.0, 30.0)])
        if aside.random() < 0.15:
            return Pending(aside.choice(list(self.world.publishers)), aside.choice(_OF_PUBLISHERS), aside.choice(_KINDS), seconds)
        point = aside.choice((*LORA_POINTS, *_IN_THE_ENGINE, "lora.read", "lora.read", "stage_lora"))
        kinds: tuple[str, ...] = _KINDS
        if point.startswith("round"):
            return Pending("coordinator", point, "coordinator crash", seconds)
        if point in _IN_THE_ENGINE and point != "drop_lora":
            kinds += ("fail",)
        kinds += CORRUPTIONS if point == "lora.read" else (SPOILED, SPOILED) if point == "stage_lora" else ()
        return Pending(aside.choice(members), point, aside.choice(kinds), seconds)

    def _engine(self) -> Any:
        alive = [engine for engine in self.world.engines.values() if engine.alive]
        return self.aside.choice(alive) if alive else None

    def _ask(self) -> None:
        engine = self._engine()
        if engine is not None:
            served = sorted(self.world.loras.visible(engine))
            name = self.aside.choice((*_NAMES, *served, *served, *self.world.loras.contents))
            self.world.loras.ask(engine, name, self.aside.uniform(0.0, 3.0))

    def _retire(self, name: str, keep: int) -> None:
        for rank in self.ranks_of(name)[:1]:
            rank.retire(name, keep)

    def _overwrite(self) -> None:
        engine = self._engine()
        if engine is not None and not self.world.calm:
            self.world.hit(_OVERWRITTEN, engine)
            self.world.loras.taken_over(engine)

    def publish_adapter(self, name: str, timeout: float) -> _AdapterPublication | None:
        """Let the ranks that live publish what they have by now."""
        world, aside = self.world, self.aside
        known = [trainer.trainer.version for trainer in world.trainers.values() if trainer.alive and trainer.trainer.version]
        ranks = self.ranks_of(name)
        if not known or not ranks or any(rank.publishing for rank in ranks):  # whose memory must not change meanwhile
            return None
        base: Version = max(known, key=lambda version: version.order)
        self._content += 1
        self._numbers[name] += 1
        world.loras.publishes(self._content, Published(name, base, aside.random() < 0.5))
        publication = _AdapterPublication(world, self._content, self._numbers[name], timeout)
        for rank in ranks:
            publication.ask(rank, aside.choice((0.0, aside.uniform(0.0, 0.05))))
        self._running.append(publication)
        publication.look()
        return publication

    async def act(self) -> None:
        await super().act()
        for publication in self._running:
            publication.look()
            await publication.end()
        self._running.clear()

    async def calm(self) -> None:
        await super().calm()
        self.world.loras.check_quiet()

    async def last(self) -> None:
        await super().last()
        world = self.world
        for name in _NAMES:
            self._retire(name, 1)
        await asyncio.sleep(5.0)
        for name in _NAMES:
            publication = self.publish_adapter(name, LAST_SECONDS)
            if publication is None:
                world.violated("stuck", f"nobody publishes {name}")
                continue
            await publication.end()
            for outcome in publication.told.values():
                if not (
                    isinstance(outcome, RoundResult) and outcome.replicas and all(one.error is None for one in outcome.replicas)
                ):
                    world.violated("stuck", f"the last publication of {name} failed: {outcome!r}")
                    continue
                lacking = [engine for engine in world.engines.values() if str(outcome.version) not in world.loras.visible(engine)]
                if lacking:
                    world.violated("stuck", f"{lacking} do not serve {outcome.version}")
        await asyncio.sleep(1.0)
        world.loras.check_quiet()
