"""Everything that exists in one schedule: processes, wires, weights; what was injected, what was seen, what was violated."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, cast

from tests.faults.points import LORA_POINTS, RELAY_POINTS, STORE_POINTS, STREAM_POINTS
from tests.simulation.clock import VirtualTimeLoop
from tests.simulation.coordination import CoordinatorProcess
from tests.simulation.faults import CORRUPTING, GATES, KILLS, SOURCE_CRASH, SOURCE_LIE, Pending
from tests.simulation.loras import Loras
from tests.simulation.ranks import Agent, EngineProcess, Process, TrainerProcess
from tests.simulation.threads import Threads, threads
from tests.simulation.transfer import Simulated
from tests.simulation.weights import SPARSE

from weightsync.model import Version
from weightsync.store.signing import SigningKey
from weightsync.transports.base import Transport

if TYPE_CHECKING:
    from tests.simulation.network import Wire

__all__ = ["World", "running_process"]

running_process: ContextVar[Process | None] = ContextVar("process", default=None)
_MOST_VIOLATIONS = 20
_UNNOTICED = 20.0  # seconds for which a lost connection may go unnoticed
_REACHED = GATES | {*STREAM_POINTS, *LORA_POINTS, *STORE_POINTS, *RELAY_POINTS}
_BACK = 4.0  # seconds in which a connection that was lost has mostly come back


class World:
    """One schedule's world. All randomness comes from ``random``, seeded with the schedule's seed.

    Where the source ``streams``, trainer ranks publish iterators of whole tensors, and some replicas are receivers.
    """

    people = False
    """Whether programs move their parameters, and look for where they are is real."""

    def __init__(self, seed: int, *, streams: bool = False, adapters: bool = False) -> None:
        self.streams = streams
        self.sharing = streams and seed % 2 == 1
        """Whether readers share the broadcasts of a stream."""
        self._breaking = random.Random(f"breaking {seed}")
        self.loop = cast("VirtualTimeLoop", asyncio.get_running_loop())
        self.random = random.Random(seed)
        self.max_unavailable = 1 if seed % 3 == 0 and not streams else None  # a third of the schedules roll through the replicas
        draw = random.Random(f"serving {seed}")  # apart, so that all other draws stay what they were
        self.serving = draw.random() < 0.4 and not streams
        """Whether engines serve their weights to others."""
        self.fan_out = draw.choice((None, 1, 1, 2)) if self.serving else None
        self.deltas = 0 if streams or random.Random(f"deltas {seed}").random() < 0.5 else 1 << 16
        """The most bytes that the changes of a version may take."""
        self.salt = self.random.getrandbits(30) | (SPARSE if self.deltas else 0)
        self.key = self.random.randbytes(32)
        self.threads = Threads(self.loop, running_process.get)
        self.scheme = Simulated(self)
        self.schemes: list[Transport] = [self.scheme]
        """By which engines read."""
        self.wires: list[Wire] = []
        self.open_sources = 0
        self.numbers: set[int] = {-1}
        """Versions that somebody tried to publish, and -1: what engines are built with."""
        self.engines: dict[str, EngineProcess] = {}
        self.trainers: dict[str, TrainerProcess] = {}
        self.coordinator: CoordinatorProcess | None = None
        self.coordinators = 0
        self.duplicating = False
        self.calm = False
        """Nothing may go wrong any more."""
        self.jumped = 0.0
        """Seconds that the machine's clock has jumped, in all."""
        self.wall_offset = 0.0
        self.pending: dict[tuple[str, str], Pending] = {}
        self.shape: dict[str, tuple[int, str]] = {}
        """Replicas: ranks and kind of engine."""
        self.trainer_shape = (1, "rows")
        self.in_place = False
        """Whether the trainer's memory is read where it is, and gone when a publication is over."""
        self.now_starting: Agent | None = None
        self.restarting: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.violations: list[str] = []
        self.torn = self.mislabelled = self.uncaught = self.corruptions = 0
        self.steps = 0
        self.trail: list[str] = []
        self.loras = Loras(self, adapters)
        """Adapters, where somebody publishes them."""
        self.publishers: dict[str, Agent] = {}
        """Ranks that publish adapters, by member."""
        self._remade: dict[str, Callable[[World], Agent]] = {}
        self.impostors: list[EngineProcess] = []
        self.misfit: EngineProcess | None = None
        """An engine that does not hold the trainer's tensors."""
        self._digests: dict[Hashable, str] = {}
        self._garbage = -1
        self._sessions = 0
        self.on_restart: Any = lambda process: None

    # Names and numbers.

    def session(self) -> str:
        """Of a new process."""
        self._sessions += 1
        return f"session-{self._sessions}"

    def garbage(self) -> int:
        """A number of content that is no version."""
        self._garbage -= 1
        return self._garbage

    def notice(self) -> float:
        """Seconds until a peer learns that a connection is gone: soon, or by a heartbeat that failed."""
        return self.random.uniform(0.0, 0.05) if self.random.random() < 0.7 else self.random.uniform(1.0, _UNNOTICED)

    def context_of(self, process: Process) -> Context:
        """In which a task belongs to ``process``."""
        context = copy_context()
        context.run(running_process.set, process)
        return context

    def current(self) -> Process:
        """The process whose code runs now."""
        process = self.threads.process()
        if process is None:
            raise RuntimeError("this code belongs to no simulated process")
        return cast("Process", process)

    def current_engine(self) -> EngineProcess:
        """The same, where only an engine rank can be meant."""
        process = self.current()
        if not isinstance(process, EngineProcess):
            raise RuntimeError(f"{process} is no engine rank")
        return process

    def starting(self) -> Agent:
        """The rank that is being made."""
        if self.now_starting is None:
            raise RuntimeError("no rank is being made")
        return self.now_starting

    def monotonic(self) -> float:
        """The clock of the process that asks."""
        process = self.threads.process()
        return self.loop.time() + (0.0 if process is None else process.clock_offset)

    def wall(self) -> float:
        """Seconds since the epoch, as far as this machine knows."""
        return 1.8e9 + self.loop.time() + self.wall_offset

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task of a process ended; by an error of a kind that it should have dealt with, it is a crash of the real code."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.threads.crashed.append(error)

    def hand_over(self, process: Process) -> None:
        """A thread of ``process`` hands a call over to the thread of all links."""

    def meaning(self, version: Version, content: int | None) -> int | None:
        """What a rank holds that takes ``version`` for its label, and holds ``content``."""
        return version.number

    def label_of(self, content: int) -> int:
        """The number under which a trainer publishes ``content``."""
        return content

    def name_of(self, version: Version) -> Hashable:
        """What no two versions with different bytes may have in common."""
        return version.number

    def coordinator_of(self, process: Process) -> CoordinatorProcess | None:
        """The coordinator to which ``process`` connects, if it runs."""
        return self.coordinator

    def sources(self) -> Iterable[Process]:
        """Processes from which replicas read, besides each other."""
        return self.trainers.values()

    # A store, where there is one.

    store_key: Callable[[], SigningKey] | None = None
    """Makes the run's key."""

    def begin(self, coordinator: CoordinatorProcess) -> None:
        """A coordinator was started: let it take connections, at once or later."""
        coordinator.ready.set()

    def excuses(self, started: float) -> bool:
        """Whether a replica that is seeded since ``started`` may fail by something that is no process."""
        return False

    # Starting and ending processes.

    def start_coordinator(self) -> None:
        """A new coordinator listens."""
        if self.coordinator is None:
            self.coordinators += 1
            self.coordinator = CoordinatorProcess(self)

    def start_engine(self, name: str, rank: int) -> EngineProcess:
        """A new process for an engine rank."""
        ranks, kind = self.shape[name]
        process = self.make_engine(name, rank, ranks, kind)
        process.troubled_until = self.loop.time()
        self.engines[process.member] = process
        return process

    def make_engine(self, name: str, rank: int, ranks: int, kind: str) -> EngineProcess:
        """A process of this kind."""
        return EngineProcess(self, name, rank, ranks, kind)

    def make_trainer(self, rank: int, ranks: int, sharing: str) -> TrainerProcess:
        """A process of a trainer rank."""
        return TrainerProcess(self, rank, ranks, sharing)

    def start_trainer(self, rank: int) -> TrainerProcess:
        """A new process for a trainer rank."""
        ranks, sharing = self.trainer_shape
        process = self.make_trainer(rank, ranks, sharing)
        process.troubled_until = self.loop.time()
        self.trainers[process.member] = process
        return process

    def start_publisher(self, make: Callable[[World], Agent]) -> None:
        """A new process for a rank that publishes adapters; ``make`` makes it."""
        process = make(self)
        process.troubled_until = self.loop.time()
        self.publishers[process.member], self._remade[process.member] = process, make

    def impostor(self, engine: EngineProcess) -> None:
        """A second process for the same rank: refused for as long as the first one's connection stands; it soon gives up."""
        name, rank = engine.name, engine.rank
        ranks, kind = self.shape[name]
        impostor = EngineProcess(self, name, rank, ranks, kind)
        self.impostors.append(impostor)
        self.loop.call_later(3.0, impostor.crash)

    def start_misfit(self) -> None:
        """An engine joins that does not hold the trainer's tensors. If it is refused at once, it ends, and is not started again."""
        self.misfit = EngineProcess(self, "misfit", 0, 1, "misfit")

    def restart_later(self, dead: Process) -> None:
        """A supervisor starts it again."""
        if dead is self.misfit or dead in self.impostors or dead.member in self.restarting:
            return
        self.restarting.add(dead.member)
        self.loop.call_later(1.0 if self.calm else self.random.uniform(0.05, 8.0), self._restart, dead)

    def _restart(self, dead: Process) -> None:
        self.restarting.discard(dead.member)
        if isinstance(dead, CoordinatorProcess):
            self.start_coordinator()
        elif dead.member in self.publishers:
            if not self.publishers[dead.member].alive:
                self.start_publisher(self._remade[dead.member])
        elif isinstance(dead, EngineProcess):
            if not self.engines[dead.member].alive:
                self.start_engine(dead.name, dead.rank)
        elif isinstance(dead, TrainerProcess) and not self.trainers[dead.member].alive:
            self.on_restart(self.start_trainer(dead.rank))

    def crash(self, process: Process) -> None:
        """Kill one process, or with half a chance all ranks of its replica; a supervisor starts them again."""
        for one in self.together(process):
            if one.alive:
                one.crash()
                self.trouble(one, 0.0)
                self.restart_later(one)

    def together(self, process: Process) -> list[Process]:
        """Processes that are killed when ``process`` is."""
        if isinstance(process, EngineProcess) and self.random.random() < 0.5:
            return [other for other in self.engines.values() if other.name == process.name]
        return [process]

    # Faults.

    def hit(self, name: str, process: Process | None = None, seconds: float = 0.0) -> None:
        """Something was injected."""
        self.injected[name] += 1
        self.trail.append(f"{self.loop.time():.4f} {name} {process or ''}")
        if process is not None:
            self.trouble(process, seconds)

    def trouble(self, process: Process, seconds: float) -> None:
        """From now on, for ``seconds``, nothing good can be expected of ``process``."""
        process.troubled_until = max(process.troubled_until, self.loop.time() + seconds)

    def at_point(self, process: Process, point: str, fast: float) -> tuple[float, str | None]:
        """How long ``process`` takes here, and what goes wrong with it, if anything. A crash never returns."""
        seconds = self.random.expovariate(1 / fast)
        found = self.pending.pop((process.member, point), None)
        if found is None or self.calm:
            return seconds, None
        kind = found.kind
        late = found.seconds if kind in ("slow", "hang") else _UNNOTICED if kind in ("disconnect", "coordinator crash") else 0.0
        self.hit(f"{kind} in {point}", process, late)
        if kind in ("slow", "hang"):
            return found.seconds, kind
        if kind == "crash":
            self.crash(process)
            self.threads.sleep(0.0)
        elif kind == "disconnect":
            for wire in process.wires:
                wire.lose(self.notice(), self.notice())
        elif kind == "coordinator crash" and self.coordinator is not None:
            self.crash(self.coordinator)
        if kind in ("disconnect", "coordinator crash") and (point in GATES or self.random.random() < 0.5):
            seconds += self.random.uniform(0.0, _BACK)  # connected again, it is still in the middle of this
        return seconds, kind

    def broadcast_breaks(self) -> bool:
        """Whether another reader spoils a broadcast of a window now."""
        breaks = self.sharing and not self.calm and self._breaking.random() < 0.1
        self.seen["window read again"] += breaks
        return breaks

    def at_source(self, reader: EngineProcess, source: Agent) -> None:
        """What goes wrong with ``source`` while ``reader`` reads from it, if it is an engine rank."""
        pending = self.pending.get((reader.member, "source"))
        if pending is None or self.calm or not isinstance(source, EngineProcess):
            return
        del self.pending[reader.member, "source"]
        self.hit(pending.kind, source)
        if pending.kind == SOURCE_CRASH:
            self.crash(source)
        elif pending.kind == SOURCE_LIE:
            source.lies = True
        else:
            source.role.session._taken()

    def reached(self, point: str) -> None:
        """The code of a process reached a point of :mod:`weightsync.failpoints`."""
        self.seen[point] += self.loras.taken and point in LORA_POINTS
        process = self.threads.process() if point in _REACHED else None
        if process is not None and (process.member, point) in self.pending:
            seconds, _ = self.at_point(process, point, fast=0.002)
            if point == "trainer.streaming":
                process.gathers_until = self.loop.time() + seconds
            self.threads.sleep(seconds)

    def corrupted_at(self, engine: EngineProcess) -> None:
        """Wrong bytes reached the memory of ``engine``, or right ones did not."""
        self.corruptions += 1

    @property
    def kills(self) -> int:
        """Processes killed."""
        return sum(self.injected[name] for name in KILLS) + sum(
            count for name, count in self.injected.items() if name.startswith("coordinator crash in")
        )

    # What must hold.

    def violated(self, kind: str, text: str) -> None:
        """An invariant does not hold."""
        if kind == "torn":
            self.torn += 1
        elif kind == "mislabelled":
            self.mislabelled += 1
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(f"{kind}: {text} (at {self.loop.time():.4f})")

    def labelled(self, engine: EngineProcess) -> None:
        """An engine rank takes a version's label: its bytes must be that version's."""
        version = engine.label
        if version is None:
            return
        engine.wrecked = False
        known = self._digests.setdefault(self.name_of(version), version.digest)
        if engine.content != self.meaning(version, engine.content):
            self.uncaught += engine.corrupt
            self.violated("mislabelled", f"{engine} takes the label {version} and holds {engine.content}")
        if known != version.digest:
            self.violated("mislabelled", f"version {version.number} has digests {known} and {version.digest}")
        engine.corrupt = False
        self.checked()

    def stepped(self) -> None:
        """A frame arrived: look when it has been dealt with."""
        self.loop.call_soon(self.checked)

    def checked(self) -> None:
        """Look at everything that answers requests."""
        self.steps += 1
        for engine in self.engines.values():
            if not engine.generating or not engine.alive or engine.wrecked:
                continue
            content = engine.content
            if content is None:
                self.violated("torn", f"{engine} generates with a mixture of weights")
            elif engine.label is not None and content != self.meaning(engine.label, content):
                self.violated("mislabelled", f"{engine} answers as {engine.label} with the bytes of {content}")
        if self.coordinator is not None:
            self._check_routable(self.coordinator)

    def _check_routable(self, coordinator: CoordinatorProcess) -> None:
        for replica in coordinator.coordinator._members.replicas.values():
            if not replica.routable or replica.version is None:
                continue
            for link in replica.links.values():
                engine = self.engines.get(link.member)
                if engine is None or not engine.alive or engine.wrecked or engine.known_as != link.rank.hello.session:
                    continue  # requests fail there, and nobody answers them wrongly
                meant = self.meaning(replica.version, engine.content)
                if engine.kind == "receiver" and engine.content == meant:
                    continue  # whether it generates already is its application's business
                if not engine.generating:
                    self.violated("unusable", f"{replica} is routable, and {engine} does not generate ({engine.label})")
                elif engine.content != meant or engine.label != replica.version:
                    self.violated("mislabelled", f"{replica} is routable, and {engine} has {engine.label} over {engine.content}")

    def check_quiet(self) -> None:
        """Nothing runs: what is dirty does not generate, and the coordinator knows it."""
        if self.coordinator is None:
            self.violated("hang", "there is no coordinator")
            return
        for replica in self.coordinator.coordinator._members.replicas.values():
            if replica.state != "dirty":
                continue
            if "did not get its turn" in (replica.error or "") and self._seedable(self.coordinator):
                self.violated("stuck", f"{replica} is free again, and nobody looks at it: {replica.error}")
            for link in replica.links.values():
                engine = self.engines.get(link.member)
                if engine is None or engine.kind == "receiver":
                    continue
                if engine.alive and engine.generating and engine.known_as == link.rank.hello.session:
                    self.violated("dirty", f"{replica} is dirty, and {engine} generates {engine.label}: {replica.error}")

    def _seedable(self, coordinator: CoordinatorProcess) -> bool:
        control = coordinator.coordinator
        return control._publications.current(control._members.trainers) is not None

    def processes(self) -> list[Agent]:
        """Agents that live."""
        others = [] if self.misfit is None else [self.misfit]
        agents = (*self.engines.values(), *self.trainers.values(), *self.publishers.values(), *others)
        return [one for one in agents if one.alive]

    def corrupting(self) -> int:
        """Corruptions injected so far."""
        return sum(count for name, count in self.injected.items() if name.rpartition(" in ")[0] in CORRUPTING)

    def bury(self) -> None:
        """End every simulated thread, so that the next schedule starts clean."""
        for thread in threads().all:
            if thread.alive:
                thread.kill()
