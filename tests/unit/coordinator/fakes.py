"""Trainer and engine ranks in this process, with faults on demand, that raise the alarm when they would serve wrong weights.

Weights are small integers: version ``n`` fills every element with bytes that depend on ``n`` and the element. An engine process
remembers for each row of its layout which version's bytes it really holds, so it knows when it is torn or mislabelled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, STREAMED, row_digests, rows_layout, streamed_digest
from tests.virtual_time import stubborn

from weightsync.config import RoundSettings
from weightsync.coordinator import Coordinator
from weightsync.coordinator.ranks import EngineRank, PublishingRank, TrainerRank, known_as
from weightsync.coordinator.status import ReplicaStatus
from weightsync.errors import Aborted, LoadError, PeerLost, StaleSource, VerificationError
from weightsync.model import Layout, Manifest, PauseMode, Version
from weightsync.model.window import WindowPart
from weightsync.protocol.messages import (
    Audit,
    Body,
    CheckSources,
    Commit,
    Delivery,
    DigestUnderKey,
    Done,
    EndStream,
    Host,
    LetGo,
    Move,
    Moved,
    MoveWindow,
    Offer,
    OpenStream,
    Pause,
    Place,
    Placed,
    PlaceWindow,
    PlanSlice,
    Prepare,
    Prepared,
    Publish,
    Quarantine,
    Resume,
    RoundResult,
    Traits,
    Update,
    Updated,
    WindowMoved,
    WindowPlaced,
)

HOST = Host("here", "memory")
GRACE = 5.0
SCRAMBLED = -1


@dataclass
class World:
    """Everything in the test: processes, faults, alarms, and one coordinator."""

    settings: RoundSettings = field(default_factory=lambda: RoundSettings(run="test", grace=GRACE, timeout=600.0))
    alarms: list[str] = field(default_factory=list)
    trainers: dict[str, TrainerProcess] = field(default_factory=dict)
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    """By member and phase: fail, crash, hang, stubborn (hangs, and ignores being cancelled), lost, vanish (lost, and no answer),
    late (takes effect and fails); of moves partial, corrupt, zero, undigested; of prepare other; of place short."""
    delays: dict[tuple[str, str], float] = field(default_factory=dict)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    """When each call on an engine rank took effect: time, member, phase."""
    looks: list[tuple[float, str, str]] = field(default_factory=list)  # the same of audits
    modes: list[PauseMode] = field(default_factory=list)
    """What each pause of an engine rank did to running requests."""
    sessions: int = 0
    live: bool = False  # trainers' memory is read in place: gone when a publication is over
    tells: bool = True
    """Whether they say so when they join."""
    serving: tuple[str, ...] = ()  # replicas that serve their weights to others
    apart: bool = False
    """Every replica has a machine of its own."""
    forging: tuple[str, ...] = ()  # members whose readers get other bytes with the same public digest
    keys: list[tuple[str, bytes]] = field(default_factory=list)
    """Key of each digest that was taken, by whom; empty for the public one of a move."""
    windows: int = 0  # trainers stream :data:`STREAMED`, with so many windows on each rank
    shared: bool = False
    """Readers of trainers share broadcasts."""
    publishing: bool = False  # whether trainers are inside of a publication

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings)

    def alarm(self, text: str) -> None:
        self.alarms.append(text)

    def session(self) -> str:
        self.sessions += 1
        return f"s{self.sessions}"

    # Membership.

    def add_trainers(self, count: int = 2, manifest: Manifest = MANIFEST, published: int = -1) -> None:
        for rank in range(count):
            self.add_trainer(rank, count, manifest, published)

    def add_trainer(self, rank: int, count: int, manifest: Manifest = MANIFEST, published: int = -1) -> None:
        process = TrainerProcess(self, rank, count, manifest, self.session(), published)
        process.connect()

    def add_replica(self, name: str, ranks: int = 1, delivery: Delivery = "auto", manifest: Manifest = MANIFEST) -> None:
        for rank in range(ranks):
            self.add_engine(name, rank, ranks, delivery, manifest)

    def add_engine(
        self, name: str, rank: int, ranks: int, delivery: Delivery = "auto", manifest: Manifest = MANIFEST
    ) -> EngineProcess:
        process = EngineProcess(self, name, rank, ranks, self.session(), delivery, manifest)
        process.connect()
        return process

    def holder(self, member: str) -> TrainerProcess | EngineProcess | None:
        """The process from whose memory readers of ``member`` read."""
        engine = self.engines.get(member)
        return self.trainers.get(member) or (engine if engine is not None and engine.connected else None)

    def replica(self, name: str) -> list[EngineProcess]:
        return [process for process in self.engines.values() if process.name == name]

    # Driving.

    async def publish(self, number: int, timeout: float = 60.0, mode: PauseMode | None = None) -> RoundResult:
        """As all trainer ranks do."""
        asking = [self.coordinator.publish(member, Publish(number, pause_mode=mode), timeout) for member in list(self.trainers)]
        self.publishing = True
        results = await asyncio.gather(*asking, return_exceptions=True)
        self.publishing = False
        for trainer in self.trainers.values():
            trainer.placed = None if self.live else trainer.placed
        for result in results:
            if isinstance(result, BaseException):
                raise result
        assert all(result == results[0] for result in results)
        if not results:
            raise PeerLost("there is no trainer")
        first = results[0]
        assert isinstance(first, RoundResult)
        for trainer in self.trainers.values():
            trainer.last = first.version
        return first

    def state(self, name: str) -> ReplicaStatus:
        return next(replica for replica in self.coordinator.status().replicas if replica.name == name)

    def states(self) -> dict[str, tuple[str, int | None]]:
        return {replica.name: (replica.state, replica.version) for replica in self.coordinator.status().replicas}

    async def drain(self, seconds: float = 700.0) -> None:
        """Let background work end."""
        await asyncio.sleep(seconds)

    def check(self) -> None:
        """The invariants, from outside: what is routable serves what it says; nothing else generates under a label."""
        assert not self.alarms, self.alarms
        problems = self.problems()
        assert not problems, problems

    def problems(self) -> list[str]:
        found = []
        for status in self.coordinator.status().replicas:
            ranks = self.replica(status.name)
            if (status.version is not None) != (status.state == "loaded"):
                found.append(f"{status.name} is {status.state} with version {status.version}")
            if status.routable:
                for rank in ranks:
                    if not rank.connected or not rank.generating or not rank.holds(status.version):
                        found.append(f"{status.name} is routable with {status.version}, but {rank}")
                    if rank.label is None or rank.label.number != status.version or rank.label.digest != status.digest:
                        found.append(f"{status.name} is routable with {status.version}, but labelled {rank.label}")
            if status.state == "dirty" and not self.coordinator.status().busy:
                found += [f"{status.name} is dirty, but {rank}" for rank in ranks if rank.connected and rank.generating]
        return found


def world_of(trainers: int, **replicas: int) -> World:
    """A world that so many trainer ranks have joined, and replicas of so many ranks, by their names."""
    world = World()
    world.add_trainers(trainers)
    for name, ranks in replicas.items():
        world.add_replica(name, ranks)
    return world


class _Process:
    world: World
    member: str
    connected: bool
    node: Any
    epoch = 0
    """Whatever began in an earlier epoch was aborted, and must not take effect any more."""

    async def fault(self, phase: str, node: Any) -> str | None:
        """Wait as long as this phase takes here, then what the test asked for, once."""
        await asyncio.sleep(self.world.delays.get((self.member, phase), 0.01))
        kind = self.world.faults.pop((self.member, phase), None)
        if kind in ("fail", "crash"):
            raise LoadError(f"{self.member} was told to fail in {phase}") if kind == "fail" else ZeroDivisionError("a bug")
        if kind == "hang":
            await asyncio.get_running_loop().create_future()
        if kind in ("lost", "vanish"):
            self.disconnect(node)
        if kind == "lost":
            raise PeerLost("the connection closed")
        if kind in ("stubborn", "vanish"):
            await stubborn()
        return kind

    def disconnect(self, node: Any = None) -> None:
        raise NotImplementedError


class _Node:
    """A rank as the coordinator sees it, in this process."""

    process: Any
    dismissed: list[str]

    def dismiss(self, reason: str) -> None:
        self.dismissed.append(reason)

    def notify(self, text: str) -> None:
        self.process.notices.append((asyncio.get_running_loop().time(), text))


class TrainerProcess(_Process):
    """A trainer rank with its region."""

    def __init__(self, world: World, rank: int, count: int, manifest: Manifest, session: str, published: int) -> None:
        self.world, self.member, self.connected = world, f"trainer/{rank}", False
        self.placed: int | None = None
        self.slots: dict[int, int] = {}
        self.asked: list[Place] = []
        """What it was asked to place."""
        self.notices: list[tuple[float, str]] = []
        self.last: Version | None = None
        self.credential = ""
        offers = (Offer("memory", "x", HOST, Traits(shared_fate=world.shared)),)

        def make() -> TrainerRank:
            hello = said(
                "trainer", rank, count, HOST, session=session, offers=offers, live=world.live and world.tells, version=self.last,
                published=self.placed if self.placed is not None else published, credential=known_as(self.credential),
                window_bytes=4096 if world.windows else 0, windows=world.windows, order=max([0, *(at.order for at in self.asked)]),
            )  # fmt: skip
            return TrainerRank(hello, manifest, rows_layout(manifest, rank, count))

        self.make = make

    def connect(self) -> None:
        node = FakeTrainer(self)
        self.world.coordinator.join_trainer(node)
        link = self.world.coordinator.link_of(self.member)
        link.confirmed, self.credential = True, link.credential
        self.world.trainers[self.member] = self
        self.node, self.connected = node, True

    def disconnect(self, node: Any = None) -> None:
        if self.connected:
            self.connected = False
            del self.world.trainers[self.member]
            self.world.coordinator.leave(node or self.node)


class FakeTrainer(_Node):
    def __init__(self, process: TrainerProcess) -> None:
        self.process: TrainerProcess = process
        self.rank, self.dismissed = process.make(), []

    async def call(self, body: Body, timeout: float) -> Body:
        match body:
            case Place():
                self.process.asked.append(body)
                digests = await self.place(body.number)
            case DigestUnderKey():
                digests = await self.digest_under_key(body.number, body.key)
            case PlaceWindow():
                return await self.place_window(body)
            case _:
                raise AssertionError(body)
        return Placed(digests.astype("<u8").tobytes(), 0)

    async def place(self, number: int) -> npt.NDArray[np.uint64]:
        process = self.process
        process.placed = None
        process.epoch += 1
        epoch = process.epoch
        kind = await process.fault("place", self)
        if epoch != process.epoch:
            raise Aborted("a newer placing took over")
        process.placed = number
        digests = row_digests(self.rank.layout, np.full(len(self.rank.layout), number, np.int64))
        return digests[:-1] if kind == "short" else digests

    async def digest_under_key(self, number: int, key: bytes) -> npt.NDArray[np.uint64]:
        if await self.process.fault("digest", self) or self.process.placed != number:
            raise StaleSource(f"{self.process.member} does not hold {number}")
        self.process.world.keys.append((self.process.member, key))
        return row_digests(self.rank.layout, np.full(len(self.rank.layout), number, np.int64), key)

    async def place_window(self, body: PlaceWindow) -> WindowPlaced:
        process, world = self.process, self.process.world
        process.epoch += 1
        epoch = process.epoch
        await process.fault("window", self)
        if epoch != process.epoch:
            raise Aborted("a newer window took over")
        if not world.publishing:
            raise Aborted("this trainer rank is not publishing")
        if body.window >= len(STREAMED):
            short = world.faults.pop((process.member, "end"), None) == "short"
            sample = np.zeros(len(STREAMED) if self.rank.hello.world_size > 1 else 0, "<u8")
            match world.faults.pop((process.member, "sample"), None):
                case "drifted":
                    sample[3] += 1
                case "short":
                    sample = sample[1:]
            return WindowPlaced(
                windows=len(STREAMED) - short, manifest=STREAMED.fingerprint, stamp=body.number, sample=sample.tobytes()
            )
        if process.placed != body.number:
            process.placed, process.slots = body.number, {}
        slot = body.window // self.rank.hello.world_size % world.windows
        if process.slots.get(slot, -1) >= body.released:
            world.alarm(f"window {process.slots[slot]} is overwritten, but windows from {body.released} on are being read")
        process.slots[slot] = body.window
        spec = STREAMED[body.window]
        digests = streamed_digest(body.window, body.number).to_bytes(8, "little")
        stamp = body.number + (world.faults.pop((process.member, "stamp"), None) == "other")
        return WindowPlaced((WindowPart(spec.name, spec.shape, spec.dtype, 0),), 3, 0, stamp, digests)


class EngineProcess(_Process):
    """An engine rank's process: memory, label, whether it generates. Sounds the alarm itself."""

    def __init__(
        self, world: World, name: str, rank: int, ranks: int, session: str, delivery: Delivery, manifest: Manifest
    ) -> None:
        self.world, self.name, self.member, self.connected = world, name, f"{name}/{rank}", False
        self.ranks, self.moves = ranks, False
        self.notices: list[tuple[float, str]] = []
        self.content = np.full(1, SCRAMBLED, np.int64)
        self.label: Version | None = None
        self.refuted = ""  # what it found in its parameters instead of what it installed
        self.generating = True  # an engine starts with whatever it was built with; nobody routes to it
        self.plan: PlanSlice | None = None
        self.sources: list[str] = []
        self.layout: Layout | None = None
        self.placed: int | None = None
        """Version that other replicas can read here."""
        self.manifest = manifest
        self.credential = ""
        self.own = None if delivery == "streamed" else rows_layout(manifest, rank, ranks)
        host = Host(name, name) if world.apart else HOST
        offers = (Offer("memory", f"{self.member}'s", host),)
        served = rows_layout(manifest, rank, ranks) if name in world.serving else None

        def make() -> EngineRank:
            hello = said(
                name, rank, ranks, host, session=session, transports=("memory",), delivery=delivery, bucket_bytes=64,
                adapter="fake", moves=self.moves,
                serving=self.label if self.generating else None,  # a rank that is paused serves nothing
                credential=known_as(self.credential), takes_any=not len(manifest), offers=offers, refuted=self.refuted,
            )  # fmt: skip
            return EngineRank(hello, manifest, self.own, None if served is None else PublishingRank(hello, manifest, served))

        self.make = make

    def __repr__(self) -> str:
        return f"<{self.member} generating={self.generating} label={self.label} content={set(self.content.tolist())}>"

    def holds(self, number: int | None) -> bool:
        """Whether every byte here is of this version."""
        return number is not None and set(self.content.tolist()) == {number}

    def refute(self, version: Version) -> None:
        """It finds other bytes than it installed, and reports it if it is connected."""
        self.content[0] = SCRAMBLED
        self.label, self.refuted = None, f"parameters of {self.member} were changed since it installed {version}"
        if self.connected:
            self.world.coordinator.refuted(self.member, version, self.refuted)

    def connect(self) -> None:
        node = FakeEngine(self)
        self.epoch += 1
        self.world.coordinator.join_engine(node)
        link = self.world.coordinator.link_of(self.member)
        link.confirmed, self.credential = True, link.credential
        self.world.engines[self.member] = self
        self.node, self.connected = node, True

    def disconnect(self, node: Any = None) -> None:
        if self.connected:
            self.connected, self.placed = False, None
            self.epoch += 1
            self.world.coordinator.leave(node or self.node)


class FakeEngine(_Node):
    def __init__(self, process: EngineProcess) -> None:
        self.process: EngineProcess = process
        self.rank, self.dismissed = process.make(), []

    async def _enter(self, phase: str) -> str | None:
        epoch = self.process.epoch
        kind = await self.process.fault(phase, self)
        if epoch != self.process.epoch:
            raise Aborted(f"{phase} was aborted by a quarantine, or its connection broke")
        log = self.process.world.looks if phase == "audit" else self.process.world.log
        log.append((asyncio.get_running_loop().time(), self.process.member, phase))
        return kind

    async def call(self, body: Body, timeout: float) -> Body:
        match body:
            case Prepare():
                return await self.prepare(body.plan)
            case CheckSources():
                await self.check_sources(body.number)
            case LetGo():
                await self._enter("let_go")
            case Audit():
                if await self._enter("audit") == "differ":
                    self.process.refute(body.version)
                if self.process.refuted:
                    raise VerificationError(self.process.refuted)
            case Place():
                return Placed((await self.place(body.number, body.epoch)).astype("<u8").tobytes(), 0)
            case Pause():
                await self.pause(body.mode)
            case Move():
                return await self.move(body.number, body.key)
            case OpenStream():
                return await self.open_stream(body)
            case MoveWindow():
                return WindowMoved((await self.move_window(body)).astype("<u8").tobytes())
            case EndStream():
                return await self.end_stream(body)
            case Commit():
                await self.commit(body.version)
            case Resume():
                await self.resume()
            case Update():
                return await self.update(body.version, body.mode)
            case Quarantine():
                await self.quarantine()
            case _:
                raise AssertionError(body)
        return Done()

    async def prepare(self, plan: PlanSlice) -> Prepared:
        kind = await self._enter("prepare")
        process = self.process
        process.plan, process.layout = plan, Layout.from_columns(process.manifest, plan.layout)
        if len(process.content) != len(process.layout):
            process.content = np.full(len(process.layout), SCRAMBLED, np.int64)
        return Prepared("other" if kind == "other" else plan.digest, ("memory",))

    async def check_sources(self, number: int) -> None:
        await self._enter("check")
        for source in [] if self.process.plan is None else self.process.plan.sources:
            holder = self.process.world.holder(source.member)
            if holder is None or holder.placed != number:
                raise StaleSource(f"{source.member} does not hold {number}")

    async def place(self, number: int, epoch: int) -> npt.NDArray[np.uint64]:
        kind = await self._enter("place")
        process, source = self.process, self.rank.source
        assert source is not None
        if not process.generating or process.label is None or process.label.order != (epoch, number):
            raise StaleSource(f"{process.member} does not serve {number}")
        process.placed = number
        content = np.full(len(source.layout), number + (kind == "corrupt"), np.int64)
        return row_digests(source.layout, content)

    async def pause(self, mode: PauseMode) -> None:
        self.process.placed = None
        self.process.world.modes.append(mode)
        await self._enter("pause")
        self.process.generating = False

    async def move(self, number: int, key: bytes = b"") -> Moved:
        process, world = self.process, self.process.world
        plan, layout = process.plan, process.layout
        assert plan is not None
        assert layout is not None
        process.label = None
        half = len(layout) // 2
        for row in range(len(layout)):
            if row == half:
                kind = await self._enter("move")
                if kind == "partial":
                    break
            if process.generating:
                world.alarm(f"{process.member} generates while its weights change")
            for source in plan.sources:
                holder = world.holder(source.member)
                if holder is None:
                    raise PeerLost(f"{source.member} is gone")
                if holder.placed != number:
                    raise StaleSource(f"{source.member} holds {holder.placed}, not {number}")
            process.content[row] = number
        public = process.content.copy()
        if kind == "corrupt":
            public[0] = number + 1
        if kind == "corrupt" or {source.member for source in plan.sources} & set(world.forging):
            process.content[0] = number + 1
        world.coordinator.progress(self.rank, plan.nbytes)
        digests = row_digests(layout, process.content if key else public, key).astype("<u8").tobytes()
        world.keys.append((process.member, key))
        if kind == "zero":
            return Moved(0, digests, 0, 0, 0, "installed")
        if kind == "undigested":
            return Moved(plan.nbytes, b"", 0, 0, 0, "installed")
        return Moved(plan.nbytes, digests, 0, 0, 0, "installed")

    async def open_stream(self, body: OpenStream) -> Prepared:
        kind = await self._enter("prepare")
        self.process.plan, self.process.layout = None, None
        self.process.sources = [source.member for source in body.sources]
        return Prepared("other" if kind == "other" else body.key, ("memory",))

    async def move_window(self, body: MoveWindow) -> npt.NDArray[np.uint64]:
        process, world = self.process, self.process.world
        if process.generating:
            world.alarm(f"{process.member} generates while its weights change")
        process.label = None
        if body.window == 0:
            process.content = np.full(len(STREAMED), SCRAMBLED, np.int64)
        kind = await self._enter("window")
        member = process.sources[body.source]
        trainer = world.trainers.get(member)
        if trainer is None:
            raise PeerLost(f"{member} is gone")
        if body.window not in trainer.slots.values():
            world.alarm(f"{process.member} reads window {body.window} from {member}, which has others")
        content = body.placed.stamp + (kind == "corrupt")
        process.content[body.window] = content
        return np.array([streamed_digest(body.window, content)], np.uint64)

    async def end_stream(self, body: EndStream) -> Moved:
        kind = await self._enter("end")
        assert body.manifest == STREAMED.fingerprint
        if kind == "corrupt":
            self.process.content[3] += 1
        digests = [streamed_digest(number, content) for number, content in enumerate(self.process.content.tolist())]
        nbytes = (1 << 64) - 1 if kind == "immense" else 24
        return Moved(nbytes, np.array(digests[: -1 if kind == "undigested" else None], "<u8").tobytes(), 0, 0, 0, "received")

    async def commit(self, version: Version) -> None:
        process, kind = self.process, await self._enter("commit")
        if process.generating:
            process.world.alarm(f"{process.member} is labelled while it generates")
        for other in process.world.replica(process.name):
            if not other.holds(version.number):
                process.world.alarm(f"{process.member} is labelled {version} while {other}")
        process.label, process.refuted = version, ""
        if kind == "late":
            raise LoadError("the caches would not empty")

    async def resume(self) -> None:
        process, kind = self.process, await self._enter("resume")
        label, ranks = process.label, process.world.replica(process.name)
        if label is None or len(ranks) != process.ranks or not all(other.holds(label.number) for other in ranks):
            process.world.alarm(f"{process.member} is resumed, but {ranks}")
        elif any(other.label != label for other in ranks):
            process.world.alarm(f"{process.member} is resumed with {label}, but {ranks}")
        process.generating = True
        if kind == "late":
            raise PeerLost("the answer got lost")

    async def update(self, version: Version, mode: PauseMode) -> Updated:
        await self.pause(mode)
        moved = await self.move(version.number)
        if right := self.process.holds(version.number):
            await self.commit(version)
            await self.resume()
        return Updated(moved, right, 0, 0)

    async def quarantine(self) -> None:
        # Agents answer it on a thread of its own, so what was sent later may have begun when it takes effect.
        await asyncio.sleep(self.process.world.delays.get((self.process.member, "before quarantine"), 0))
        self.process.epoch += 1
        self.process.generating = False  # takes effect even where the answer does not arrive
        self.process.label, self.process.placed, self.process.refuted = None, None, ""
        await self._enter("quarantine")
