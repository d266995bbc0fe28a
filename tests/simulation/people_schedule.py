"""A schedule of people: programs run, are interrupted, and publish what they trained; now and then somebody wants harm."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.acts import happen
from tests.simulation.engine_program import CALLBACKS, MODULES, MOVES, OUTSIDE, RETIE, ModuleProcess
from tests.simulation.faults import Pending, draw_faults
from tests.simulation.hostile import HARMS, PLACE, harm
from tests.simulation.people import HOLD, STRIKES, PeopleWorld
from tests.simulation.schedule import LAST_SECONDS, Schedule
from tests.simulation.training_program import CHANGES, INTERRUPTIONS, SLACK, ProgramTrainer, Step, steps

from weightsync.protocol.messages import RoundResult

__all__ = ["PEOPLE_ACTIONS", "PEOPLE_STATES", "PeopleSchedule"]

PEOPLE_ACTIONS = (
    *INTERRUPTIONS,
    *(f"parameters {change}" for change in CHANGES),
    *(f"{move}{where}" for move in MOVES for where in ("", f" {OUTSIDE}")),
    *(f"raised in {name}" for name in (*CALLBACKS, "offload", "restore")),
    RETIE, "long request", HOLD, *(f"{kind} at a wait" for kind in STRIKES if kind != HOLD),
    *(f"hostile: {kind}" for kind in HARMS), "bytes forged for a digest",
)  # fmt: skip
"""What programs and thieves do."""
PEOPLE_STATES = (
    *(f"step {what}" for what in ("published", "raised Interrupted", "raised KeyboardInterrupt", "raised RoundFailed")),
    "module in use", "module was not free",
)  # fmt: skip
"""What comes of it."""

_KINDS = (*MODULES, *MODULES, "direct", "whole")
_MOST_WAITS = 150


class PeopleSchedule(Schedule):
    """See the module."""

    world: PeopleWorld

    def __init__(self, world: PeopleWorld, seed: int) -> None:
        super().__init__(world, seed)
        self.gathering = self.misfit = False
        self.harms: list[str] = []
        """What somebody who wants harm does, an act each."""
        self.numbered = self.draw.random() < 0.5
        """Whether steps give their versions numbers. Without them, all trainer ranks are killed together: one that starts alone
        does not know which of their publications are left for it."""
        if self.draw.random() < 0.35:
            self.harms = self.draw.choices(HARMS, k=self.draw.choice((1, 2)))
        self.quiet = PLACE in self.harms
        if self.harms and self.draw.random() < 0.7:
            world.serving, world.fan_out = True, self.draw.choice((1, 1, 2))

    def cast(self) -> None:
        """Who takes part."""
        draw, world = self.draw, self.world
        world.trainer_shape = (draw.choice((1, 2)), draw.choice(("rows", "copies", "parts", "parts")))
        world.in_place = draw.random() < 0.15
        world.trainers_together = not self.numbered
        for index in range(draw.choice((1, 1, 2, 2, 3))):
            world.shape[f"r{index}"] = (draw.choice((1, 2)), draw.choice(_KINDS))
        while world.fan_out and len(world.shape) < 3:
            world.shape[f"r{len(world.shape)}"] = (1, draw.choice(_KINDS))
        world.start_coordinator()
        for name in world.shape:
            self.start_replica(name)
        for rank in range(world.trainer_shape[0]):
            world.start_trainer(rank)

    async def act(self) -> None:
        """A few steps of the training program, while engines' programs run."""
        draw, world = self.draw, self.world
        engines = {f"{name}/{rank}": kind for name, (ranks, kind) in world.shape.items() for rank in range(ranks)}
        trainers = [f"trainer/{rank}" for rank in range(world.trainer_shape[0])]
        timed, pending = draw_faults(draw, engines, trainers) if draw.random() < 0.3 else ([], [])
        quiet = self.quiet  # a trainer's place is free while it is away, as the threat model says
        strike = draw.choice(STRIKES) if draw.random() < 0.4 else ""
        if quiet:
            timed, pending, strike = [], [], ""
        world.pending = {(one.member, one.point): one for one in pending}
        self._draw_raising(list(engines), trainers)
        living = [*world.processes(), *([] if world.coordinator is None else [world.coordinator])]
        if strike and living:  # the act before may have killed everything
            world.strike_later(draw.choice(living), draw.randrange(1, _MOST_WAITS), strike)
        timers = [world.loop.call_later(fault.at, happen, world, fault) for fault in timed]
        if self.harms:
            world.loop.call_later(draw.choice((0.0, draw.uniform(0.0, 0.2), draw.uniform(0.0, 3.0))), harm, world, self.harms.pop())
        world.begin_act()
        await self.program(draw.choice((1, 1, 2, 3)))
        for timer in timers:
            timer.cancel()
        world.pending.clear()
        world.duplicating = False
        for name in list(world.shape):
            self.start_replica(name)
        await asyncio.sleep(draw.choice((0.0, 0.02, draw.uniform(0.0, 1.0), draw.uniform(1.0, 30.0))))

    def _draw_raising(self, engines: list[str], trainers: list[str]) -> None:
        draw = self.draw
        if draw.random() < 0.15:
            member, point = draw.choice(engines), draw.choice(CALLBACKS)
            self.world.pending[member, point] = Pending(member, point, "fail", 0.0)
        if draw.random() < 0.1:
            member, point = draw.choice(trainers), draw.choice(("offload", "restore"))
            self.world.pending[member, point] = Pending(member, point, "fail", 0.0)

    async def program(self, count: int) -> dict[str, Any]:
        """Let all trainer ranks run a program of ``count`` steps; the outcomes of their last steps, by member."""
        draw, world = self.draw, self.world
        number = self._next() + draw.randrange(2) if self.numbered else None
        chosen = steps(draw, count, world.trainer_shape[0], world.content, number, live=world.in_place)
        world.content += count
        ranks = [one for one in world.trainers.values() if isinstance(one, ProgramTrainer) and one.alive and not one.publishing]
        if world.trainers_together and len(ranks) < world.trainer_shape[0]:
            return {}  # one that starts later would make all of these calls, too
        return await self._perform(ranks, chosen)

    def _next(self) -> int:
        """A number that was not published yet."""
        coordinator = self.world.coordinator
        known = [one.trainer._last for one in self.world.trainers.values()]
        self.number = max(self.number, *known, -1 if coordinator is None else coordinator.coordinator._publications.last) + 4
        return self.number

    async def _perform(self, ranks: list[ProgramTrainer], program: list[Step]) -> dict[str, Any]:
        world, told = self.world, dict[str, Any]()
        over = asyncio.Event()

        def look() -> None:
            if all(one.member in told or not one.alive for one in ranks):
                over.set()

        def tell(trainer: ProgramTrainer, outcome: Any) -> None:
            told[trainer.member] = outcome
            look()

        for trainer in ranks:
            trainer.perform(program, self.draw.choice((0.0, self.draw.uniform(0.0, 0.02), self.draw.uniform(0.0, 1.0))), tell)
        look()
        began, jumped = world.loop.time(), world.jumped
        limit = 2 * sum(step.timeout + 2 * SLACK for step in program) + 30.0
        while not over.is_set():
            stalled = max((one.stalled_until for one in ranks), default=0.0)
            if world.loop.time() > max(began + limit + world.jumped - jumped, stalled + limit):
                waiting = [one for one in ranks if one.member not in told and one.alive]
                if waiting:
                    world.violated("hang", f"{waiting} never came to the end of their program")
                break
            try:
                async with asyncio.timeout(5.0):
                    await over.wait()
            except TimeoutError:
                look()
        return told

    async def last(self) -> None:
        """Nothing is broken for ever: one more publication reaches everybody."""
        world = self.world
        number = self._next() if self.numbered else None
        step = Step(world.content, "in place", number, LAST_SECONDS, False, {})
        told = await self._perform(
            [one for one in world.trainers.values() if isinstance(one, ProgramTrainer) and one.alive], [step]
        )
        if len(told) < world.trainer_shape[0]:
            world.violated("stuck", f"of {world.trainer_shape[0]} trainer ranks, {list(told)} published")
        number = None
        for outcome in told.values():
            if isinstance(outcome, RoundResult) and not any(one.error for one in outcome.replicas if one.name in world.shape):
                number = outcome.version.number
            else:
                world.violated("stuck", f"the last publication failed: {outcome!r}")
        if number is not None:
            self.everybody_has(number, step.content)
        for engine in world.engines.values():
            if isinstance(engine, ModuleProcess) and engine.memory.strayed():
                world.violated("stray", f"{engine}: something was written to memory that a parameter had left")
