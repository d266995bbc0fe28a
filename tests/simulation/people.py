"""A world of people: training and engine programs that do what programs do, and a participant that wants harm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextvars import Context

from tests.simulation.engine_program import MODULES, Agreement, Collective, ModuleProcess, Turn, turns
from tests.simulation.ranks import Agent, EngineProcess, Process, TrainerProcess
from tests.simulation.threads import Event, Thread, threads
from tests.simulation.training_program import ProgramTrainer
from tests.simulation.world import World, running_process

from weightsync.model import Version

__all__ = ["FIRST_CONTENT", "HOLD", "STRIKES", "STRIKE_COORDINATOR", "PeopleWorld"]

FIRST_CONTENT = 1_000
"""Contents are counted from here: which number a version gets is not known before."""
HOLD = "interpreter lock held"
STRIKE_COORDINATOR = "coordinator crash"
STRIKES = ("crash", "disconnect", STRIKE_COORDINATOR, HOLD)
"""What happens to a process where one of its threads waits, whatever for."""
_HEARTBEATS = (10.0, 20.0)  # seconds in which a peer that stands still is given up
_HELD_SECONDS = 30.0


class PeopleWorld(World):
    """See the module. Versions mean contents: that of the step which published them."""

    people = True
    hostile = "hostile"
    """How replicas of a thief are called."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = seed
        self.draw = random.Random(f"people {seed}")
        self.content = FIRST_CONTENT
        self._meanings: dict[tuple[int, int], int] = {}
        self._held: dict[Process, float] = {}
        self._strikes: dict[Process, tuple[int, str]] = {}
        self.curtain = Event()
        """Set when an act begins."""
        self._act = 0
        self._together: dict[str, Collective] = {}
        self.agreements: dict[str, Agreement] = {}
        """Of each replica whose ranks enter together."""
        self.hostiles: list[Agent] = []
        """Processes of a thief."""
        self._poisons = -5_000
        self.trainers_together = False
        """Whether all trainer ranks are killed together."""
        self.threads.on_wait = self._waits

    def poison(self) -> int:
        """A number of content that only a thief has."""
        self._poisons -= 1
        self.numbers.add(self._poisons)
        return self._poisons

    # What versions mean.

    def meaning(self, version: Version, content: int | None) -> int | None:
        """See :meth:`World.meaning`: what the first rank held that took the version, if a step published it."""
        if content is not None and content >= FIRST_CONTENT:
            return self._meanings.setdefault(version.order, content)
        return self._meanings.get(version.order, FIRST_CONTENT - 1)

    def published(self, trainer: ProgramTrainer, version: Version, content: int) -> None:
        """A trainer rank was told that what it published as ``content`` is ``version``."""
        known = self.meaning(version, content)
        if known != content:
            self.violated("mislabelled", f"{trainer} was told that {content} is {version}, which is {known}")

    def labelled(self, engine: EngineProcess) -> None:
        """See :meth:`World.labelled`. What a thief's engine holds is its own affair."""
        if engine.member.startswith(self.hostile):
            self.checked()
        else:
            super().labelled(engine)

    # Programs of engines.

    def begin_act(self) -> None:
        """Let every engine's program run."""
        self._act += 1
        self._together.clear()
        before, self.curtain = self.curtain, Event()
        before.set()

    def program_of(self, engine: ModuleProcess) -> tuple[Sequence[Turn], Collective | None]:
        """What the program of ``engine`` does in this act, and with whom it generates in step."""
        chosen = turns(random.Random(f"program {self.seed} {engine.name} {self._act}"))
        if engine.ranks == 1:
            return chosen, None
        ranks = [one for one in self.engines.values() if one.name == engine.name and one.alive]
        if len(ranks) < engine.ranks:
            return (), None
        return chosen, self._together.setdefault(engine.name, Collective(engine.ranks))

    # Processes.

    def make_engine(self, name: str, rank: int, ranks: int, kind: str) -> EngineProcess:
        """See :meth:`World.make_engine`."""
        make = ModuleProcess if kind in MODULES else EngineProcess
        return make(self, name, rank, ranks, kind)

    def make_trainer(self, rank: int, ranks: int, sharing: str) -> TrainerProcess:
        """See :meth:`World.make_trainer`."""
        return ProgramTrainer(self, rank, ranks, sharing)

    def together(self, process: Process) -> list[Process]:
        """See :meth:`World.together`: ranks whose collectives would hang without one another are always killed together."""
        if isinstance(process, ModuleProcess):
            return [other for other in self.engines.values() if other.name == process.name]
        if self.trainers_together and process in self.trainers.values():
            return list(self.trainers.values())
        return super().together(process)

    def processes(self) -> list[Agent]:
        """See :meth:`World.processes`."""
        return [*super().processes(), *(one for one in self.hostiles if one.alive)]

    def restart_later(self, dead: Process) -> None:
        """See :meth:`World.restart_later`. A thief's process is not started again."""
        if dead not in self.hostiles:
            super().restart_later(dead)

    # Waits.

    def hand_over(self, process: Process) -> None:
        """See :meth:`World.hand_over`."""
        threads().sleep(self.random.uniform(0.0, 0.0005))

    def strike_later(self, process: Process, waits: int, kind: str) -> None:
        """Let ``kind`` happen to ``process`` where one of its threads waits, after so many waits."""
        self._strikes[process] = waits, kind

    def _waits(self, thread: Thread) -> None:
        process = thread.process
        if isinstance(process, ProgramTrainer):
            process.waits(thread)
        if process in self._strikes and not self.calm:
            left, kind = self._strikes.pop(process)
            if left > 1:
                self._strikes[process] = left - 1, kind
            else:
                self.loop.call_later(self.draw.expovariate(1 / 0.002), self._strike, process, kind)

    def _strike(self, process: Process, kind: str) -> None:
        if self.calm or not process.alive:
            return
        if kind == HOLD:
            self.hold_lock(process, self.draw.choice((1.0, 12.0, _HELD_SECONDS)))
            return
        self.hit(f"{kind} at a wait", process, _HEARTBEATS[1] if kind in ("disconnect", STRIKE_COORDINATOR) else 0.0)
        if kind == "crash":
            self.crash(process)
        elif kind == "disconnect":
            for wire in process.wires:
                wire.lose(self.notice(), self.notice())
        elif self.coordinator is not None:
            self.crash(self.coordinator)

    def hold_lock(self, process: Process, seconds: float) -> None:
        """A thread of ``process`` holds the interpreter lock: nothing else of it moves for ``seconds``."""
        self.hit(HOLD, process, 2 * seconds)
        process.stalled_until = self._held[process] = self.loop.time() + seconds
        self.loop.postponed = self._postponed
        if process is self.coordinator:
            self.jumped += seconds  # nobody is told in time
            for one in self.processes():
                self.trouble(one, seconds)
        for wire in process.wires:
            if seconds >= _HEARTBEATS[1] or (seconds > _HEARTBEATS[0] and self.draw.random() < 0.5):
                self.loop.call_later(self.draw.uniform(*_HEARTBEATS), wire.lose, 0.0, 0.0, context=Context())

    def _postponed(self, context: Context) -> float:
        process = context.get(running_process)
        return 0.0 if process is None else self._held.get(process, 0.0)
