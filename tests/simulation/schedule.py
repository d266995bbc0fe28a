"""One schedule: a random run of weightsync with faults, then calm, one more publication, and the end of everybody."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.faults.points import ENGINE_REPAIR_POINTS
from tests.simulation.acts import happen
from tests.simulation.coordination import GRACE
from tests.simulation.faults import SOURCE_POINTS, draw_faults, in_a_stream, source_fault
from tests.simulation.installation import installed
from tests.simulation.ranks import TrainerProcess
from tests.simulation.threads import Thread
from tests.simulation.world import World

from weightsync.errors import RoundFailed, WeightSyncError
from weightsync.protocol.messages import RoundResult

__all__ = ["CALM_SECONDS", "LAST_SECONDS", "Outcome", "Schedule", "play"]

KINDS = ("direct", "direct", "whole", "opaque")
_SLACK = 2.5  # seconds in which a publication that ran out of time is told so: answers, the link's own grace, wires
CALM_SECONDS = 150.0  # longer than anything that was drawn may hang, and than the longest round
LAST_SECONDS = 60.0
_BLINKS = (0.0, 0.1, 2.5)  # when three trainer ranks ask
_BLINK_AT = 0.5


@dataclass
class Outcome:
    """What came of one schedule. Adds up."""

    schedules: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    corruptions: int = 0
    torn: int = 0
    mislabelled: int = 0
    hangs: int = 0
    leaks: int = 0
    uncaught: int = 0
    steps: int = 0
    failed: list[tuple[int, list[str]]] = field(default_factory=list)
    """Seeds whose schedules violated something, and what."""

    def add(self, other: Outcome) -> None:
        """Count ``other`` in."""
        for name in ("schedules", "kills", "corruptions", "torn", "mislabelled", "hangs", "leaks", "uncaught", "steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seen += other.seen
        self.injected += other.injected
        self.failed += other.failed


class _Publication:
    """One number, published by every trainer rank that lives."""

    def __init__(self, world: World, number: int, timeout: float, snapshot: bool) -> None:
        self.world, self.number, self.timeout, self.snapshot = world, number, timeout, snapshot
        self.told: dict[str, Any] = {}
        self.asked: dict[str, TrainerProcess] = {}
        self.over = asyncio.Event()
        self._last, self._jumped = 0.0, world.jumped

    def ask(self, trainer: TrainerProcess, after: float, number: int | None = None) -> None:
        world = self.world
        self.asked[trainer.session] = trainer
        self._last = max(self._last, world.loop.time() + after + self.timeout + 2 * _SLACK + 0.5)
        jumped, stalled = world.jumped, trainer.stalled_until

        def told(process: TrainerProcess, outcome: Any, seconds: float) -> None:
            self.told[process.session] = outcome
            ended = max(world.loop.time() - seconds + self.timeout, process.gathers_until)  # an iterator has to come to its end
            late = world.loop.time() - ended - (world.jumped - jumped) - _SLACK
            if late > 0 and process.stalled_until <= stalled and not process.clock_offset:
                world.violated("hang", f"{process} was told {late:.3f} s too late: {outcome!r}")
            self._note(outcome)
            self.look()

        self._begin(trainer, self.number if number is None else number, after, told)

    def _begin(self, trainer: TrainerProcess, number: int, after: float, told: Any) -> None:
        trainer.publish(number, self.timeout, self.snapshot, after, told)

    def _note(self, outcome: Any) -> None:
        seen = self.world.seen
        seen["publish with a snapshot"] += self.snapshot
        if isinstance(outcome, RoundResult):
            seen["publish returned"] += 1
        else:
            seen[f"publish raised {type(outcome).__name__}"] += 1
            if not isinstance(outcome, WeightSyncError | TimeoutError):
                self.world.violated("crash", f"publish raised {outcome!r}")

    def look(self) -> None:
        """Set :attr:`over` when nobody is left who could be told."""
        if all(session in self.told or not trainer.alive for session, trainer in self.asked.items()):
            self.over.set()

    async def end(self) -> None:
        """Wait for everybody; whoever is not told in time hangs."""
        loop = self.world.loop
        while not self.over.is_set():
            resumed = max(
                (max(one.stalled_until, one.gathers_until) + self.timeout + 2 * _SLACK for one in self.asked.values()), default=0.0
            )
            left = max(self._last, resumed) + (self.world.jumped - self._jumped) - loop.time()
            if left <= 0:
                waiting = [trainer for session, trainer in self.asked.items() if session not in self.told and trainer.alive]
                if waiting:
                    self.world.violated("hang", f"{waiting} still publish version {self.number}")
                return
            try:
                async with asyncio.timeout(min(left, 5.0)):
                    await self.over.wait()
            except TimeoutError:
                self.look()


class Schedule:
    """The course of one run: who takes part, what is published, and what goes wrong meanwhile."""

    later: tuple[str, ...] = ()
    """Moments that may come after the publication of an act."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(f"script {seed}")
        self.number = self.draw.randrange(3)
        self.leaks = 0
        extra = random.Random(f"extra {seed}")  # apart from the script, so that what it draws stays what it was
        self.gathering = extra.random() < 0.2 and not world.streams  # a rank of a stream does not ask a second time
        """Three trainer ranks, of which one's connection breaks while they gather for the last publication."""
        self.misfit = extra.random() < 0.15 and not world.streams
        self.relayed = random.Random(f"relayed {seed}")

    def cast(self) -> None:
        """Who takes part."""
        draw, world = self.draw, self.world
        world.trainer_shape = (draw.choice((1, 2, 2)), draw.choice(("rows", "rows", "copies")))
        world.in_place = draw.random() < 0.2 or world.streams
        for index in range(draw.choice((1, 2, 2, 3))):
            kind = draw.choice(KINDS)
            if world.streams and kind == "direct":
                kind = "receiver"
            world.shape[f"r{index}"] = (draw.choice((1, 2)), kind)
        while world.fan_out and len(world.shape) < 3:  # waves, and somebody who waits for them
            world.shape[f"r{len(world.shape)}"] = (self.relayed.choice((1, 1, 2)), self.relayed.choice(("direct", "whole")))
        if self.gathering:
            world.trainer_shape = (3, world.trainer_shape[1])
        if self.misfit:
            world.start_misfit()
        world.start_coordinator()
        late = draw.random() < 0.3 and len(world.shape) > 1
        for name in list(world.shape)[late:]:
            self.start_replica(name)
        for rank in range(world.trainer_shape[0]):
            world.start_trainer(rank)

    def start_replica(self, name: str) -> None:
        for rank in range(self.world.shape[name][0]):
            if f"{name}/{rank}" not in self.world.engines:
                self.world.start_engine(name, rank)

    async def act(self) -> None:
        """One publication, with whatever goes wrong around it; now and then none."""
        draw, world = self.draw, self.world
        engines = {f"{name}/{rank}": kind for name, (ranks, kind) in world.shape.items() for rank in range(ranks)}
        timed, pending = draw_faults(draw, engines, [f"trainer/{rank}" for rank in range(world.trainer_shape[0])])
        names = {fault.name for fault in timed}
        if world.streams:
            pending = [in_a_stream(draw, planned) for planned in pending]
        world.pending.clear()
        for one in pending:
            world.pending[one.member, one.point] = one
        if world.serving and self.relayed.random() < 0.7:
            one = source_fault(self.relayed, list(engines))
            world.pending[one.member, one.point] = one
        self.beside(engines)
        timers = [world.loop.call_later(fault.at, happen, world, fault) for fault in timed]
        timeout = draw.uniform(0.02, 3.0) if "publisher in a hurry" in names else draw.choice((12.0, 25.0, 40.0))
        if draw.random() < 0.85:
            await self.publish(timeout, draw.random() < 0.2, names)
        else:
            await asyncio.sleep(draw.uniform(0.1, 5.0))
        for timer in timers:
            timer.cancel()
        later = {*ENGINE_REPAIR_POINTS, *SOURCE_POINTS, *self.later, "source"}  # a re-seed comes after the publication
        for key in [key for key in world.pending if key[1] not in later]:
            del world.pending[key]
        world.duplicating = False
        self.start_replica("r0")
        await asyncio.sleep(draw.choice((0.0, 0.02, draw.uniform(0.0, 1.0), draw.uniform(1.0, 30.0))))

    def beside(self, engines: dict[str, str]) -> None:
        """Plan what else happens in an act."""

    async def publish(self, timeout: float, snapshot: bool, names: set[str], blink: bool = False) -> _Publication:
        draw, world = self.draw, self.world
        self.number += 1 + draw.randrange(2)
        publication = _Publication(world, self.number, timeout, snapshot)
        ranks = [trainer for trainer in world.trainers.values() if trainer.alive and not trainer.publishing]
        if "trainer rank absent" in names and len(ranks) > 1:
            world.hit("trainer rank absent")
            ranks.pop(draw.randrange(len(ranks)))
        blink = blink and len(ranks) > 1  # a rank that crashed meanwhile leaves nobody to wait for
        odd = draw.randrange(len(ranks)) if "trainer ranks differ" in names and len(ranks) > 1 else -1
        for index, trainer in enumerate(ranks):
            if index == odd:
                world.hit("trainer ranks differ")
            if "publisher in a hurry" in names:
                world.hit("publisher in a hurry", trainer, timeout)
            number = self.number + 1 if index == odd else self.number
            after = draw.choice((0.0, draw.uniform(0.0, 0.01), draw.uniform(0.0, 1.0)))
            publication.ask(trainer, _BLINKS[index] if blink else after, number)
        if blink:
            world.loop.call_later(_BLINK_AT, self.blink, ranks[0])
        self.number += odd >= 0
        joins = draw.random() < 0.6

        def restarted(process: Any) -> None:
            if joins and isinstance(process, TrainerProcess) and not publication.over.is_set() and process.alive:
                publication.ask(process, 0.05)

        world.on_restart = restarted
        publication.look()
        await publication.end()
        world.on_restart = lambda _: None
        return publication

    def blink(self, trainer: TrainerProcess) -> None:
        """Its connection breaks, and it connects again at once."""
        self.world.injected["trainer rank blinks while ranks gather"] += 1
        for wire in trainer.wires:
            if not wire.cut:
                wire.lose(0.0, 0.0)

    async def calm(self) -> None:
        """Faults stop. Whatever was drawn ends, and everybody who died is started again."""
        world = self.world
        world.calm = True
        world.start_coordinator()
        for name in world.shape:
            self.start_replica(name)
        await asyncio.sleep(CALM_SECONDS)
        world.check_quiet()

    async def last(self) -> None:
        """Nothing is broken for ever: one more publication reaches everybody."""
        world = self.world
        publication = await self.publish(LAST_SECONDS, False, set(), self.gathering)
        if len(publication.told) < world.trainer_shape[0]:
            world.violated("stuck", f"of {world.trainer_shape[0]} trainer ranks, {list(publication.told)} published")
        for outcome in publication.told.values():
            if not self.as_it_should(outcome):
                why = outcome if isinstance(outcome, RoundFailed | RoundResult) else repr(outcome)
                world.violated("stuck", f"the last publication failed: {why}")
        self.everybody_has(self.number, self.number)

    def everybody_has(self, number: int, content: int) -> None:
        """Every replica is in service with version ``number``, which means ``content``."""
        world = self.world
        if world.coordinator is None:
            return
        replicas = {replica.name: replica for replica in world.coordinator.coordinator.status().replicas}
        for engine in world.engines.values():
            state = replicas.get(engine.name)
            loaded = state is not None and state.routable and state.version == number
            if not (loaded and engine.alive and engine.generating and engine.content == content):
                world.violated("stuck", f"{engine} is left with {engine.label}, generating={engine.generating}: {state}")

    def as_it_should(self, outcome: Any) -> bool:
        """Every replica has the version; but where all are required and one does not fit, the round fails by that one alone."""
        misfit = self.world.misfit
        if misfit is not None and misfit.alive:
            return isinstance(outcome, RoundFailed) and "must: misfit: ManifestMismatch" in str(outcome)
        return isinstance(outcome, RoundResult) and all(one.error is None for one in outcome.replicas)

    async def end(self) -> None:
        """Everybody leaves, and nothing may be left behind."""
        world = self.world
        for agent in world.processes():
            Thread(agent.close, f"closing {agent.member}", owner=agent).start()
        await asyncio.sleep(2 * GRACE)
        if world.coordinator is not None:
            world.coordinator.shut_down()
        await asyncio.sleep(60.0)
        left = [f"thread {thread.name}" for thread in world.threads.all if thread.alive]
        left += [f"task {task.get_coro()}" for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if world.open_sources:
            left.append(f"{world.open_sources} open sources")
        for line in left:
            self.leaks += 1
            world.violated("leak", line)


async def play(world: World, schedule: Schedule, seed: int) -> Outcome:
    """Run ``schedule`` in ``world``, from the first process's start to the last one's end."""
    with installed(world):
        try:
            schedule.cast()
            await asyncio.sleep(schedule.draw.choice((0.0, 0.1, 1.0)))
            for _ in range(schedule.draw.choice((2, 3, 3, 4))):
                await schedule.act()
            await schedule.calm()
            await schedule.last()
            await schedule.end()
        finally:
            world.bury()
            await asyncio.sleep(0.01)
    for error in world.threads.crashed:
        world.violated("crash", "".join(traceback.format_exception(error)[-4:]))
    hangs = sum(line.startswith(("hang", "stuck")) for line in world.violations)
    return Outcome(
        schedules=1, seen=world.seen, injected=world.injected, kills=world.kills, corruptions=world.corruptions, torn=world.torn,
        mislabelled=world.mislabelled, hangs=hangs, leaks=schedule.leaks, uncaught=world.uncaught, steps=world.steps,
        failed=[(seed, [*world.violations, *world.trail])] if world.violations else [],
    )  # fmt: skip
