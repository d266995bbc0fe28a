"""An engine program around the real :class:`~weightsync.ModuleAdapter`: it generates, perhaps in step, and moves parameters."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tests.simulation.moving import MovingMemory
from tests.simulation.ranks import EngineProcess
from tests.simulation.threads import Event, Thread, threads
from tests.simulation.weights import MANIFEST

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.in_step import InStep
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded, LoadError
from weightsync.model import Manifest, PauseMode, Version
from weightsync.tensors.shards import Shard

if TYPE_CHECKING:
    from tests.simulation.people import PeopleWorld

__all__ = ["CALLBACKS", "MODULES", "MOVES", "OUTSIDE", "RETIE", "Agreement", "Collective", "ModuleProcess", "Turn", "turns"]

MODULES = ("module", "module", "module streamed", "module declared anew")
"""Kinds of engine processes: written in place, streamed to, and with an adapter that keeps no reference to what it declares."""

CALLBACKS = ("shards", "begin", "wake_weights", "wake_cache", "aborted")
"""Methods of an adapter that may raise, beside those at which anything may happen."""

MOVES = ("moved", "replaced", "cast and back")
"""Not laid out anew: an engine whose parameters get other strides must be restarted, and says so."""
RETIE = "retied"
OUTSIDE = "outside of in_use"
_MOST_TURNS = 8
_IN_USE_SECONDS = 60.0
_COLLECTIVE_SECONDS = 100.0


@dataclass(frozen=True)
class Turn:
    """One use of the module: after ``gap`` seconds, for ``hold``; ``how`` it moves its parameters in the middle, or before."""

    gap: float
    hold: float
    how: str = ""
    outside: bool = False
    which: tuple[int, ...] = ()


def turns(draw: random.Random) -> list[Turn]:
    """What the program of one replica does in one act, on all its ranks."""
    chosen = []
    for _ in range(draw.randrange(_MOST_TURNS)):
        gap = draw.choice((0.0, draw.expovariate(1 / 0.01), draw.expovariate(1 / 0.05)))
        hold = draw.choice((draw.expovariate(1 / 0.02), draw.expovariate(1 / 0.05)))
        if draw.random() < 0.03:
            hold = draw.uniform(3.0, 40.0)  # a request that takes its time
        how = draw.choice(MOVES) if draw.random() < 0.3 else RETIE if draw.random() < 0.02 else ""
        which = range(len(MANIFEST)) if draw.random() < 0.5 else draw.sample(range(len(MANIFEST)), 2)
        chosen.append(Turn(gap, hold, how, how in MOVES and draw.random() < 0.2, tuple(which)))
    return chosen


class Collective:
    """What ranks of a replica that generate in step wait for: each other. Broken for good when one does not come."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._arrived, self._event = ranks, 0, Event()
        self.broken = False

    def meet(self) -> bool:
        """Wait for all ranks; whether they came."""
        self._arrived += 1
        if self._arrived == self._ranks:
            event, self._event, self._arrived = self._event, Event(), 0
            event.set()
        elif not self.broken:
            event = self._event
            self.broken |= not event.wait(_COLLECTIVE_SECONDS)
        return not self.broken

    def leave(self) -> None:
        """This rank comes no more."""
        self.broken = True
        self._event.set()


class Agreement:
    """What the ranks of a replica say when all are asked, question by question: the process group of :class:`InStep`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.members: set[int] = set()
        self._answers: dict[int, list[Sequence[int]]] = {}
        self._all: dict[int, Event] = {}

    def answer(self, question: int, parts: Sequence[int]) -> None:
        """Answer for one rank."""
        answers, everybody = self._answers.setdefault(question, []), self._all.setdefault(question, Event())
        answers.append(parts)
        if len(answers) == self.ranks:
            everybody.set()

    def wait(self, question: int, seconds: float) -> list[int] | None:
        """The least of each part; ``None`` if they have not all answered in time."""
        return [min(parts) for parts in zip(*self._answers[question], strict=True)] if self._all[question].wait(seconds) else None


class _InStep(InStep):
    """The real one over simulated messages."""

    def __init__(self, rank: int, agreement: Agreement) -> None:
        super().__init__(range(agreement.ranks))
        self._agreement, self._question = agreement, 0
        agreement.members.add(rank)

    def _ask(self, answers: Sequence[int], deadline: Deadline, least: float) -> int:
        self._question += 1
        self._agreement.answer(self._question, answers)
        return self._question

    def _answer(self, asked: int, deadline: Deadline, least: float) -> list[int]:
        threads().sleep(0.001)
        agreed = self._agreement.wait(asked, max(deadline.left, least) or deadline.remaining("waiting for the other ranks"))
        if agreed is None:
            raise DeadlineExceeded("the other ranks did not answer")
        return agreed


class _Adapter(ModuleAdapter):
    """The real adapter, taking its time, raising on demand, and watched."""

    name = "module of a program"
    pauses_twice = True
    sleeps = False
    loads_some = True

    def __init__(self, process: ModuleProcess, memory: MovingMemory) -> None:
        self._process, self._memory = process, memory
        super().__init__(memory.module)
        if process.ranks > 1:
            self.replica_ranks = process.ranks
            self._in_step = _InStep(process.rank, process.agreement())

    def _pass(self, point: str) -> str | None:
        seconds, kind = self._process.world.at_point(self._process, point, fast=0.002)
        threads().sleep(seconds)
        if kind == "fail":
            raise LoadError(f"{self._process.member} was told to fail in {point}")
        return kind

    def _perhaps(self, point: str) -> None:
        world = self._process.world
        if not hasattr(self._process, "link"):
            return  # its process is starting, and is not started again if that fails
        if not world.calm and world.pending.pop((self._process.member, point), None) is not None:
            world.hit(f"raised in {point}", self._process, 5.0)
            raise LoadError(f"{self._process.member} was told to raise in {point}")

    def manifest(self) -> Manifest:
        return MANIFEST

    def shards(self) -> Sequence[Shard]:
        self._perhaps("shards")
        if self._process.kind != "module declared anew":
            return super().shards()
        pairs = zip(self._memory.shards, self._memory.parameters(), strict=True)
        return [Shard(one.name, one.shape, one.box, tensor.detach()) for one, tensor in pairs]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._pass("pause")
        super().pause(mode, timeout)
        self._process.stands()

    def begin(self) -> None:
        self._perhaps("begin")
        super().begin()

    def wake_weights(self) -> None:
        self._perhaps("wake_weights")

    def wake_cache(self) -> None:
        self._perhaps("wake_cache")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._pass("load")
        super().load(tensors)
        self._process.written(None)

    def finish(self, version: Version) -> None:
        self._pass("finish")
        super().finish(version)
        self._process.label = version
        self._process.world.labelled(self._process)

    def flush(self) -> bool:
        return self._pass("flush") != "refused"

    def resume(self) -> None:
        self._pass("resume")
        super().resume()
        self._process.generating = True
        self._process.world.checked()

    def aborted(self, reason: str) -> None:
        self._perhaps("aborted")


class ModuleProcess(EngineProcess):
    """An engine rank whose program uses a module."""

    memory: MovingMemory
    adapter: _Adapter

    def __init__(self, world: PeopleWorld, name: str, rank: int, ranks: int, kind: str) -> None:
        self.people = world
        super().__init__(world, name, rank, ranks, kind)
        self.ready: Event | None = None
        """The beginning of the act that its program waits for."""
        Thread(self._program, f"{self.member} program", owner=self).start()

    def _make_memory(self) -> MovingMemory:
        return MovingMemory(self.rank, self.ranks, "copies")

    def agreement(self) -> Agreement:
        """That of this replica's ranks as they are started: all of them die together."""
        known = self.people.agreements
        if self.name not in known or self.rank in known[self.name].members:
            known[self.name] = Agreement(self.ranks)
        return known[self.name]

    def _make_adapter(self, direct: bool) -> EngineAdapter:
        self.adapter = _Adapter(self, self.memory)
        return self.adapter

    @property
    def written_in_place(self) -> bool:
        """See :attr:`EngineProcess.written_in_place`."""
        return self.kind != "module streamed"

    def stands(self) -> None:
        """Nobody uses the module any more."""
        self.generating, self.label = False, None
        self.world.checked()

    def _program(self) -> None:
        while not self.role.session.closed:
            self.ready = self.people.curtain
            self.ready.wait(_LONGEST_ACT)
            if not self.people.calm and not self.role.session.closed:
                self._act(*self.people.program_of(self))

    def _act(self, chosen: Sequence[Turn], together: Collective | None) -> None:
        for turn in chosen:
            threads().sleep(turn.gap)
            if turn.outside and not self.adapter._paused:  # in a round nothing but in_use() keeps a program from its parameters
                self._change(turn, f"{turn.how} {OUTSIDE}")
            try:
                with self.adapter.in_use(_IN_USE_SECONDS) as version:
                    self._generate(turn, version, together)
                if self.adapter._paused:  # a pause may have given up waiting for this
                    self.stands()
            except DeadlineExceeded:
                self.world.seen["module was not free"] += 1
                if together is not None:
                    together.leave()
            if together is not None and together.broken:
                return

    def _generate(self, turn: Turn, version: Version | None, together: Collective | None) -> None:
        self.world.seen["module in use"] += 1
        if turn.hold > _LONG:
            self.world.hit("long request", self, turn.hold)
        self._check(version)
        if together is not None and not together.meet():
            return
        threads().sleep(turn.hold / 2)
        if turn.how and not turn.outside:
            self._change(turn, turn.how)
        threads().sleep(turn.hold / 2)
        if together is None or together.meet():
            self._check(version)

    def _check(self, version: Version | None) -> None:
        content = self.content
        if version is not None and not self.wrecked and content != self.world.meaning(version, content):
            kind = "torn" if content is None else "mislabelled"
            self.world.violated(kind, f"{self} generates as {version} with the bytes of {content}")

    @property
    def _written(self) -> bool:
        """Whether an update writes its parameters. It ends when the coordinator that ran it is lost: this rank stays as it is."""
        control = self.world.coordinator
        replicas = control.coordinator._members.replicas.values() if control is not None else ()
        states = [one.state for one in replicas for link in one.links.values() if link.rank.hello.session == self.known_as]
        state = self.role.session.state
        return bool(states) and (state == "writing" or (state in ("written", "committed") and states == ["updating"]))

    def _change(self, turn: Turn, what: str) -> None:
        if turn.how == RETIE and self.world.calm:
            return  # an act may last until then: nothing may break that the last publication has repaired
        if turn.how == RETIE:
            self.world.hit(what, self, 10.0)
            self.wrecked = True
            self.memory.retie()
            self.world.loop.call_later(self.world.random.uniform(0.0, 8.0), self._mend)
        else:
            self.world.injected[what] += 1
            self.world.trail.append(f"{self.world.loop.time():.4f} {what} {self}")
            self.memory.move(turn.how, turn.which)
        self.refresh()

    def _mend(self) -> None:
        """Its program takes the parameters apart again, not while an update writes them; the values stay broken until the next."""
        if self.alive and self._written:
            self.world.loop.call_later(1.0, self._mend)
        elif self.alive:
            self.memory.untie()
            self.refresh()

    def close(self, timeout: float = 5.0) -> None:
        """See :meth:`EngineProcess.close`."""
        super().close(timeout)
        if self.ready is not None:
            self.ready.set()


_LONG = 2.0
_LONGEST_ACT = 5000.0
