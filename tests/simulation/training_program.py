"""A training program: it trains, moves and offloads its parameters, publishes with or without numbers, is interrupted anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.moving import MOVES, MovingMemory
from tests.simulation.ranks import TrainerProcess
from tests.simulation.threads import Event, Thread, threads

from weightsync.errors import VersionError, WeightSyncError
from weightsync.protocol.messages import RoundResult, Welcome

if TYPE_CHECKING:
    from tests.simulation.people import PeopleWorld

__all__ = ["CHANGES", "INTERRUPTIONS", "SLACK", "Interrupted", "Interruption", "ProgramTrainer", "Step", "steps"]

SLACK = 2.5
"""Seconds in which a publication that ran out of time is told so: answers, the link's own grace, wires."""

_JOIN_SECONDS = 60.0

CHANGES = ("in place", *MOVES, "offloaded and back", "reshaped", "published while offloaded", "moved while published")
"""What happens to parameters between two publications, or during one."""


class Interrupted(RuntimeError):
    """What a signal handler raises: a watchdog, a scheduler that wants the machine back."""


INTERRUPTIONS: dict[str, Callable[[], BaseException]] = {
    "interrupted by a signal handler": lambda: Interrupted("watchdog: this takes too long"),
    "interrupted by Ctrl-C": KeyboardInterrupt,
}


@dataclass(frozen=True)
class Interruption:
    """``kind`` is raised after the call has waited ``waits`` times and ``after`` seconds; perhaps ``again`` while it unwinds."""

    kind: str
    waits: int
    after: float
    again: int = 0
    trouble: float = 0.0
    """Seconds for which the other ranks may wait for this one then."""


@dataclass(frozen=True)
class Step:
    """What all ranks do: ``change`` parameters such that they hold ``content``, and publish them."""

    content: int
    change: str
    number: int | None
    timeout: float
    asynchronous: bool
    interruptions: dict[int, Interruption]
    """By rank."""


FAILING = ("reshaped", "published while offloaded")
"""Changes after which nothing can be published: an error, until they are undone."""


def steps(draw: random.Random, count: int, ranks: int, first: int, number: int | None, *, live: bool) -> list[Step]:
    """A program of ``count`` steps, for ``ranks`` ranks. Contents are counted from ``first``, versions from ``number`` if given."""
    program = []
    for index in range(count):
        timeout = draw.uniform(0.05, 3.0) if draw.random() < 0.1 else draw.choice((12.0, 25.0, 40.0))
        interruptions = {}
        for rank in range(ranks):
            if draw.random() < 0.3:
                waits = draw.choice((1, 1, 2, 2, 3, draw.randrange(1, 12)))
                after = draw.choice((0.0, draw.expovariate(1 / 0.004), draw.expovariate(1 / 0.03), draw.uniform(0.0, 10.0)))
                again = draw.choice((0, 0, 1, 2))
                interruptions[rank] = Interruption(draw.choice(list(INTERRUPTIONS)), waits, after, again, timeout)
        change = draw.choice(CHANGES) if draw.random() < 0.4 else CHANGES[0]
        asynchronous = draw.random() < 0.4 and not live
        program.append(
            Step(first + index, change, None if number is None else number + index, timeout, asynchronous, interruptions)
        )
    return program


class ProgramTrainer(TrainerProcess):
    """A trainer rank whose program does what people do."""

    memory: MovingMemory
    world: PeopleWorld

    def __init__(self, world: PeopleWorld, rank: int, ranks: int, sharing: str) -> None:
        self.trained: int | None = None
        """What a copy of its parameters holds now; ``None`` for a step that is not done."""
        super().__init__(world, rank, ranks, sharing)
        self._joined = Event()
        self._thread: Thread | None = None
        self._interruption: Interruption | None = None
        self._waits = 0
        self._calling = False
        self._raises = ""
        self.trainer._offload, self.trainer._restore = lambda: self._callback("offload"), lambda: self._callback("restore")

    def _make_memory(self) -> MovingMemory:
        return MovingMemory(self.rank, self.ranks, self.sharing)

    def _state(self) -> Any:
        return self.memory.state()

    def welcomed(self, welcome: Welcome) -> None:
        """See :meth:`TrainerProcess.welcomed`."""
        super().welcomed(welcome)
        self._joined.set()

    def _callback(self, name: str) -> None:
        threads().sleep(self.world.random.uniform(0.0, 0.002))
        if not self.world.calm and self.world.pending.pop((self.member, name), None) is not None:
            self.world.hit(f"raised in {name}", self, 5.0)
            raise RuntimeError(f"{self.member} was told to raise in {name}")

    def perform(self, program: Sequence[Step], after: float, told: Callable[[ProgramTrainer, Any], None]) -> None:
        """Run ``program`` in this rank's main thread; ``told(rank, outcome of its last step)`` when it is over."""
        self._thread = Thread(lambda: self._perform(program, after, told), f"{self.member} main", owner=self)
        self._thread.start()

    def _perform(self, program: Sequence[Step], after: float, told: Callable[[ProgramTrainer, Any], None]) -> None:
        self.publishing = True
        threads().sleep(after)
        self._joined.wait(_JOIN_SECONDS)  # as Trainer's constructor does
        outcome: Any = None
        asked: list[tuple[Step, Future[RoundResult]]] = []
        for step in program:
            self._train(step)
            outcome = self._publish_step(step, asked)
            self._after(step)
            threads().sleep(self.world.random.expovariate(1 / 0.005))
        for step, future in asked:
            outcome = self._checked(step, lambda future=future, step=step: future.result(step.timeout + SLACK))  # type: ignore[misc]
        self.publishing = False
        told(self, outcome)

    # One step.

    def _train(self, step: Step) -> None:
        world, memory = self.world, self.memory
        world.numbers.add(step.content)
        world.injected[f"parameters {step.change}"] += 1
        if step.change in MOVES:
            memory.move(step.change)
        if step.change == "offloaded and back":
            memory.offload()
            threads().sleep(world.random.expovariate(1 / 0.002))
            memory.onload()
        memory.fill(step.content, world.salt)
        if step.change == "reshaped":
            memory.reshape()
        elif step.change == "published while offloaded":
            memory.offload()
        if step.change in FAILING:
            world.trouble(self, step.timeout)
        self.trained = step.content
        if step.change == "moved while published":  # by another thread: the values that it leaves behind stay
            world.loop.call_later(world.random.expovariate(1 / 0.02), self._move)

    def _move(self) -> None:
        if self._calling and self.alive:
            self.memory.move(self.world.random.choice(("moved", "replaced")))

    def _after(self, step: Step) -> None:
        """The next training step begins: memory holds no version at all."""
        self.trained = None
        if step.change == "published while offloaded":
            self.memory.onload()
        elif step.change == "reshaped":
            self.memory.untie()
        self.scribble()

    def _publish_step(self, step: Step, asked: list[tuple[Step, Future[RoundResult]]]) -> Any:
        def publish() -> RoundResult | None:
            self._await_interruption(step.interruptions.get(self.rank))
            try:
                if step.asynchronous:
                    asked.append((step, self.trainer.publish_async(step.number, timeout=step.timeout)))
                    return None
                return self.trainer.publish(step.number, timeout=step.timeout)
            finally:
                self._calling, self._interruption = False, None

        return self._checked(step, publish)

    def _checked(self, step: Step, call: Callable[[], RoundResult | None]) -> Any:
        """What came of ``call``, which must end in time, with a result of what was published, or an error of the library."""
        world = self.world
        started, jumped, stalled = world.loop.time(), world.jumped, self.stalled_until
        outcome: Any
        try:
            outcome = call()
        except (WeightSyncError, TimeoutError, Interrupted, KeyboardInterrupt) as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - what is not the program's own is a violation
            outcome = error
            if step.change not in FAILING and "was told to raise" not in str(error):
                world.violated("crash", f"{self}: publish raised {error!r}")
        late = world.loop.time() - started - step.timeout - (world.jumped - jumped) - SLACK
        if late > 0 and self.stalled_until <= stalled and not self.clock_offset:
            world.violated("hang", f"{self} was told {late:.3f} s too late: {outcome!r}")
        if isinstance(outcome, RoundResult):
            world.published(self, outcome.version, step.content)
        elif isinstance(outcome, VersionError) and step.number is None and "ranks differ" not in str(outcome):
            world.violated("refused", f"{self} published without a number, and was told: {outcome}")
        world.seen[
            "step published" if outcome is None or isinstance(outcome, RoundResult) else f"step raised {type(outcome).__name__}"
        ] += 1
        return outcome

    # Signals.

    def _await_interruption(self, interruption: Interruption | None) -> None:
        self._calling = True
        self._interruption = interruption
        self._waits = 0 if interruption is None else interruption.waits

    def waits(self, thread: Thread) -> None:
        """A thread of this process is about to wait."""
        if thread is not self._thread or self._interruption is None or not self._calling:
            return
        self._waits -= 1
        if self._waits == 0:
            one = self._interruption
            self.world.loop.call_later(one.after, self._interrupt, thread, one)

    def _interrupt(self, thread: Thread, one: Interruption) -> None:
        if not self._calling or not self.alive or one is not self._interruption or not thread.alive:
            return
        self.world.hit(one.kind, self, one.trouble)
        self._interruption, self._waits = (
            (Interruption(one.kind, one.again, 0.001, 0, one.trouble), one.again) if one.again else (None, 0)
        )
        thread.interrupt(INTERRUPTIONS[one.kind]())
