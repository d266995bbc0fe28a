"""Simulated processes: an engine rank, a trainer rank. Real roles and links inside; what they hold is watched."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tests.simulation.loras import SPOILED
from tests.simulation.threads import Executor, Lock, Thread, threads
from tests.simulation.weights import MANIFEST, MISFIT, Memory, Sharing, version_bytes

from weightsync.config import Address, ClientSettings, Secret, Timeouts
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.fill.filler import Filler
from weightsync.engine.receiver import Receiver, _Handover
from weightsync.engines.module_loras import ModuleLoras
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, LoadError, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Manifest, PauseMode, Version
from weightsync.model.lora import AdapterSpec, LoraSlots
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import Body, Delivery, Host, RoundResult, Welcome
from weightsync.protocol.round_log import MissedReplicas
from weightsync.protocol.worker import received_for
from weightsync.publishing.copied_shards import HostPublisher
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import ShardOptions
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.trainer.requests import PublishRequests
from weightsync.trainer.storing import Storing
from weightsync.trainer.stream import Stream, StreamRole
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import LOOPBACK
from weightsync.transports.host.region import EMPTY, PublishedRegion

if TYPE_CHECKING:
    from tests.simulation.network import Wire
    from tests.simulation.world import World

__all__ = ["TOKEN", "Agent", "EngineProcess", "Process", "SimulatedAdapter", "TrainerProcess"]

_LINK_GRACE = 1.0
_PLACING_STEP = 0.25
_HANDOVER_SECONDS, _LOOP_SECONDS, _CALM_LOOP_SECONDS = 30.0, 60.0, 1000.0
_WINDOW_BYTES = 64
TOKEN = Secret("simulated")
"""What every worker has."""
_SETTINGS = ClientSettings(coordinator=Address("http", "127.0.0.1", 7400), token=TOKEN, timeouts=Timeouts(reconnect=2.0))


class Process:
    """Something that can crash, stall, and have a clock of its own."""

    def __init__(self, world: World, member: str) -> None:
        self.world, self.member = world, member
        self.alive = True
        self.stalled_until = self.unreachable_until = 0.0
        self.clock_offset = 0.0
        self.gathers_until = 0.0
        """Until when the iterator of its stream takes its own time."""
        self.troubled_until = 0.0
        """Until when what it does may be late or wrong."""
        self.wires: list[Wire] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<{self.member}{'' if self.alive else ' (dead)'}>"

    def spawn(self, work: Any) -> None:
        """A task of this process: what it starts belongs to the process, too."""
        task = self.world.loop.create_task(work, context=self.world.context_of(self))
        task.add_done_callback(self.world.ended)
        self.tasks.append(task)

    def crash(self) -> None:
        """Gone, between one step and the next. Its peers learn of it in their own time."""
        self.alive = False
        for wire in self.wires:
            wire.lose(0.0, self.world.notice())
        for task in self.tasks:
            task.cancel()
        for thread in threads().all:
            if thread.process is self and thread.alive:
                thread.kill()


class _Link(CoordinatorConnection):
    """The real link on the schedule's one loop, and simulated threads as its callers."""

    process: Agent

    def connect(self) -> Welcome:
        """Start connecting; unlike the real one, do not wait for the first welcome."""
        self.process.spawn(self._guard())
        return Welcome(self._name, "")

    async def _guard(self) -> None:
        try:
            await self._stay()
        except WeightSyncError as error:
            self.process.world.seen["agent refused"] += 1
            self.process.world.seen[f"agent refused: {type(error).__name__}"] += 1
            self.process.refused()
        finally:
            self._ended.set()
            if self._returning is not None:
                self._returning.cancel()

    def call(self, body: Body, timeout: float) -> Body:
        """As the real one, in virtual time."""
        from weightsync.deadline import Deadline

        loop = self._loop
        if loop is None or self._closed:
            raise Aborted("the link is closed")
        self.process.world.hand_over(self.process)
        task = loop.create_task(self._ask(body, Deadline(timeout)), context=self.process.world.context_of(self.process))
        self.process.tasks.append(task)
        try:
            threads().wait(lambda wake: task.add_done_callback(lambda _: wake()), timeout + _LINK_GRACE)
        except BaseException:
            task.cancel()  # as the real one: the call is withdrawn
            raise
        if task.cancelled():
            raise Aborted("the link was closed")
        if not task.done():
            task.cancel()
            raise DeadlineExceeded(f"the coordinator did not answer {type(body).__name__} within {timeout:g} s")
        return task.result()


class Agent(Process, ABC):
    """A process with a link to the coordinator."""

    def __init__(self, world: World, name: str, rank: int, ranks: int) -> None:
        super().__init__(world, f"{name}/{rank}")
        self.name, self.rank, self.ranks = name, rank, ranks
        self.session = world.session()
        self.known_as = hashlib.sha256(self.session.encode()).hexdigest()
        """What the coordinator keeps of the session."""
        self.host = Host(f"host-{name}-{rank}", f"memory-{name}-{rank}")
        self.stale = np.zeros(1, np.uint8)
        """What the region held before, for pieces that never arrive."""
        self.lies = False
        """Readers of the region find other bytes than were digested."""
        self.points = ""
        """Begins the names of the moments at which others read from it."""
        world.now_starting = self

    def refused(self) -> None:
        """The coordinator does not take this process: it ends, and is started again."""
        self.crash()
        self.world.restart_later(self)

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Leave in good order."""


class SimulatedAdapter(EngineAdapter):
    """An engine with parameters, a label and a moment of its own for every step; it answers with both when it generates."""

    name = "simulated"
    loads_some = True

    def __init__(self, process: EngineProcess, direct: bool) -> None:
        self._process = process
        self._direct = direct
        self._stands = False

    def manifest(self) -> Manifest:
        return MISFIT if self._process.kind == "misfit" else MANIFEST

    def shards(self) -> Sequence[Shard] | None:
        return self._process.memory.shards if self._direct else None

    def _pass(self, point: str) -> str | None:
        world = self._process.world
        seconds, kind = world.at_point(self._process, point, fast=0.004)
        threads().sleep(seconds)
        if kind == "fail":
            raise LoadError(f"{self._process.member} was told to fail in {point}")
        return kind

    def pause(self, mode: PauseMode, timeout: float) -> None:
        if self._stands:
            self._process.world.violated("twice", f"{self._process.member} is paused a second time, and has not been resumed")
        self._pass("pause")
        self._stands, self._process.generating = True, False
        self._process.world.checked()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        dropped = self._pass("load") == "dropped by the loader"
        for name, tensor in tensors:
            if dropped:
                dropped = False
                self._process.written("dropped by the loader")
                continue
            threads().sleep(self._process.world.random.uniform(0.0, 0.001))
            self._process.memory.load(name, tensor)
            self._process.written(None)

    def finish(self, version: Version) -> None:
        self._pass("finish")
        self._process._stale = True  # words that were replaced since the last look are not reported one by one
        self._process.label = version
        self._process.world.labelled(self._process)

    def flush(self) -> bool:
        return self._pass("flush") != "refused"

    def resume(self) -> None:
        self._stands = False
        self._pass("resume")
        self._process.generating = True
        self._process.world.checked()
        self._process.world.loras.look(self._process)

    def lora_slots(self) -> LoraSlots | None:
        return None if self._process.loras is None else self._process.loras.slots

    def check_lora(self, spec: AdapterSpec, manifest: Manifest) -> None:
        self._loras.check(spec, manifest)

    def stage_lora(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        kind = self._pass("stage_lora")
        copies = self._loras.stage(label, spec, tensors)
        if kind == SPOILED:
            next(iter(copies.values())).view(torch.int32)[0, 0] ^= 1
        self._process.world.loras.staged(self._process, label)
        return copies

    def register_lora(self, version: Version) -> None:
        self._pass("register_lora")
        self._loras.register(version)
        self._process.world.loras.registered(self._process, version)

    def drop_lora(self, label: str) -> None:
        self._pass("drop_lora")
        self._loras.drop(label)

    def loras(self) -> Collection[str]:
        return self._loras.labels()

    @property
    def _loras(self) -> ModuleLoras:
        if self._process.loras is None:
            raise ConfigurationError(f"{self._process.member} takes no adapters")
        return self._process.loras


class EngineProcess(Agent):
    """An engine rank. Knows at any time which version's bytes it really holds."""

    def __init__(self, world: World, name: str, rank: int, ranks: int, kind: str) -> None:
        super().__init__(world, name, rank, ranks)
        self.kind = kind
        self.memory = self._make_memory()
        self.label: Version | None = None
        self.generating = True  # with whatever it was built with; unlabelled, and nobody routes to it
        self.corrupt = False
        """Wrong bytes arrived in the running move."""
        self.wrecked = False
        """Its own program spoiled its parameters: until it takes another label, nothing good can be expected of its answers."""
        self.loras = world.loras.of_an_engine()
        """The adapters that it holds; ``None`` if it takes none."""
        self.memory.fill(-1, world.salt)
        self._known = {self.memory.expected(-1, world.salt): -1}
        self._content: int | None = -1
        self._stale = False
        self.engine = Engine.__new__(Engine)
        direct = kind not in ("opaque", "misfit")
        handover = _Handover(None, _HANDOVER_SECONDS) if kind == "receiver" else None
        role = EngineRole(
            handover or self._make_adapter(direct),
            self.world.schemes,
            self.host,
            progress=self._progress,
            report=self._report,
            alone=ranks == 1,
            member=self.member,
        )
        delivery: Delivery = "direct" if self.written_in_place else "streamed"
        self.role = role
        fields = {
            "replica": name, "rank": rank, "world_size": ranks, "_run": "", "_session": Secret(self.session), "_delivery": delivery,
            "_host": self.host, "_role": role, "_url": "",
        }  # fmt: skip
        vars(self.engine).update(fields)
        if world.serving and direct:
            served = self.engine._served = role.serve_weights([world.scheme], world.key, LOOPBACK)
            served._placer = _Placer(self, served._placer)
            self.stale = np.zeros(max(served.layout.regions[0], 1), np.uint8)
        self.link = _Link(
            _SETTINGS, hello=self.engine._hello, receive=role.receive, on_lost=lambda _: role.session.abort(), name=self.member
        )
        self.link.process = self
        self.link.connect()
        self._receiver: Receiver | None = None
        if handover is not None:
            self._receiver = Receiver.__new__(Receiver)
            vars(self._receiver).update(_handover=handover, _engine=self.engine, _timeout=_HANDOVER_SECONDS, _origin=Origin())
            Thread(self._consume, f"{self.member} application", owner=self).start()

    def _make_memory(self) -> Memory:
        return Memory(self.rank, self.ranks, "copies" if self.kind in ("whole", "receiver") else "rows")

    def _make_adapter(self, direct: bool) -> EngineAdapter:
        return SimulatedAdapter(self, direct)

    @property
    def written_in_place(self) -> bool:
        """Whether its parameters are written directly."""
        return self.kind == "direct"

    def _consume(self) -> None:
        """The application of a receiver: its own loader, for one publication after the other."""
        receiver, world = self._receiver, self.world
        while receiver is not None and not self.role.session.closed:
            try:
                for batch in receiver.receive(_CALM_LOOP_SECONDS if world.calm else _LOOP_SECONDS):
                    self.generating, self.label = False, None
                    self._take(batch)
                self.label = receiver.serving
                self.generating = self.label is not None
                world.seen["stream received"] += 1
                world.labelled(self)
                if self.content is None:
                    world.violated("torn", f"{self} was told that all of a stream arrived, and holds a mixture")
            except WeightSyncError as error:
                world.seen[f"receive raised {type(error).__name__}"] += 1
                world.trouble(self, 0.0)  # its own time may be over in the middle of a stream
                self.generating = False
                threads().sleep(0.01)

    def _take(self, batch: Iterable[tuple[str, torch.Tensor]]) -> None:
        seconds, kind = self.world.at_point(self, "load", fast=0.004)
        threads().sleep(seconds)
        for name, tensor in batch:
            threads().sleep(self.world.random.uniform(0.0, 0.001))
            if kind == "fail":
                raise LoadError(f"{self.member} was told to fail in load")
            self.memory.load(name, tensor)
            self.written(None)

    def _progress(self, nbytes: int) -> None:
        self.link.progress(nbytes)

    def _report(self, body: Body) -> None:
        self.link.report(body, 5.0)

    def written(self, corruption: str | None) -> None:
        """Bytes of the parameters may have changed."""
        self._stale = True
        if corruption is not None:
            self.corrupt = True
            self.world.corrupted_at(self)
        if self.generating and self.written_in_place and self.content is None:
            self.world.violated("torn", f"{self.member} generates while its weights change")
        self.world.checked()

    def refresh(self) -> None:
        """Its own program changed parameters."""
        self._stale = True
        self.world.checked()

    @property
    def content(self) -> int | None:
        """The version that every byte here is of; -1 before the first; ``None`` for a mixture."""
        staged = self.role._staged is not None
        if self._stale or staged:
            self._stale = staged  # and once more when that is gone: words may have been replaced in between
            held = self.memory.bytes.tobytes()
            if held not in self._known:
                for number in self.world.numbers:
                    self._known.setdefault(self.memory.expected(number, self.world.salt), number)
            self._content = self._known.get(held)
        return self._content

    def close(self, timeout: float = 5.0) -> None:
        """Leave in good order, as :meth:`weightsync.Engine.close` does."""
        if self._receiver is not None:
            self._receiver._handover.close()
        self.role.close(timeout)
        self.link.close(timeout)

    def crash(self) -> None:
        """See :meth:`Process.crash`. What the operating system would free is freed."""
        filler = self.role._filler
        super().crash()
        self.world.loop.call_later(0.0, self._free, filler)

    def _free(self, filler: Filler | None) -> None:
        self.role._release()
        self.role.loras._release()
        if filler is not None:
            filler._owned.close()  # which a filler puts off while its receiver thread runs; that thread died without an end


class _Placer(HostPublisher):
    """The real placer, taking its time."""

    def __init__(self, process: Agent, real: Any) -> None:  # not the base's: all that is asked of it goes to the real one
        self._process, self._real = process, real

    def place(self, stop: Any = None, deadline: Any = None) -> Any:
        world = self._process.world
        seconds, kind = world.at_point(self._process, "place", fast=0.005)
        while seconds > 0 and not stop[0]:  # the compiled copy looks at the flag every few hundred KiB
            threads().sleep(min(seconds, _PLACING_STEP))
            seconds -= _PLACING_STEP
        if kind == "fail":
            raise Aborted("placing was told to fail")
        digests = self._real.place(stop, deadline)
        self._process.lies = False
        threads().sleep(world.random.uniform(0.0, 0.002))
        return digests


class _InPlaceRole(TrainerRole):
    """What a trainer rank does that lets its GPU's memory be read in place: after a publication, nobody finds a version there."""

    live = True

    def disarm(self) -> None:
        super().disarm()
        if isinstance(self.region, PublishedRegion) and self.region.version != EMPTY:
            self.region.header.invalidate()


class _Tiny(Stream):
    """With windows that are smaller than the largest tensor."""

    @property
    def capacity(self) -> int:
        return _WINDOW_BYTES


class TrainerProcess(Agent):
    """A trainer rank: the real :class:`~weightsync.Trainer` without its constructor, and a script that calls it."""

    _class: type[Trainer] = Trainer

    def __init__(self, world: World, rank: int, ranks: int, sharing: Sharing, name: str = "trainer") -> None:
        super().__init__(world, name, rank, ranks)
        self.sharing = sharing
        self.memory = self._make_memory()
        self.scribble()
        self.role = role = self._make_role()
        if not isinstance(role.region, PublishedRegion):
            raise RuntimeError("a simulated trainer rank publishes from host memory")
        self.region = role.region
        self.stale = np.zeros(max(self.region.nbytes, 1), np.uint8)
        self.publishing = False
        self.trainer = self._class.__new__(self._class)
        fields = {
            "rank": rank, "world_size": ranks, "_run": "", "_session": Secret(self.session), "_published": -1, "_host": self.host,
            "_origin": Origin(), "_role": role, "_publishing": Lock(), "_background": Executor(1, "publish"),
            "_asked": None, "_offload": None, "_restore": None, "_new_epoch": False, "_last": -1, "_calls": 0,
            "_missed": MissedReplicas(logging.getLogger(__name__)), "_requests": PublishRequests(None),
        }  # fmt: skip
        vars(self.trainer).update(fields)
        self.link = _Link(
            _SETTINGS, hello=self.trainer._hello, receive=received_for(role.handle), on_welcome=self.welcomed, name=self.member
        )
        self.link.process = self
        self.trainer._link = self.link
        self.trainer._storing = Storing(_SETTINGS, role, rank, self.link.call)
        self.link.connect()

    def welcomed(self, welcome: Welcome) -> None:
        """The coordinator has taken it."""
        self.trainer._welcomed(welcome)

    def _make_memory(self) -> Memory:
        return Memory(self.rank, self.ranks, self.sharing)

    def _make_role(self) -> TrainerRole | StreamRole:
        world = self.world
        if world.streams:
            access = ReaderAccess([world.scheme], world.key, self.host)
            return StreamRole(_Tiny(windows=2 + world.salt % 2), access, self.rank, self.ranks)
        return self._placing(_InPlaceRole if world.in_place else TrainerRole, world.deltas)

    def _placing(self, kind: type[TrainerRole], deltas: int = 0) -> TrainerRole:
        role = kind(self._state(), ReaderAccess([self.world.scheme], self.world.key, self.host), ShardOptions(deltas=deltas))
        role._placer = _Placer(self, role._placer)
        return role

    def _state(self) -> Any:
        """What the trainer is made of."""
        return MANIFEST, self.memory.shards

    def scribble(self) -> None:
        """The next training step: memory holds what is no version at all."""
        self.memory.fill(self.world.garbage(), self.world.salt)

    def publish(self, number: int, timeout: float, snapshot: bool, after: float, told: Any) -> None:
        """Publish in a thread of this process; ``told(process, result or error, seconds)`` when it is over."""
        Thread(lambda: self._publish(number, timeout, snapshot, after, told), f"{self.member} training", owner=self).start()

    def _publish(self, number: int, timeout: float, snapshot: bool, after: float, told: Any) -> None:
        world = self.world
        self.publishing = True
        threads().sleep(after)
        self.stale = self.region.payload.copy()
        self.memory.fill(number, world.salt)
        world.numbers.add(number)
        started = world.loop.time()
        outcome: RoundResult | BaseException
        tensors = self._gathered(number, timeout)
        try:
            if world.streams:
                outcome = self.trainer.publish_stream(tensors, number, timeout=timeout)
            elif snapshot and not self.role.live:
                future = self.trainer.publish_async(world.label_of(number), timeout=timeout)
                self.scribble()
                outcome = future.result(timeout + 2 * _LINK_GRACE)
            else:
                outcome = self.trainer.publish(world.label_of(number), timeout=timeout)
        except WeightSyncError as error:
            outcome = error
        except TimeoutError as error:
            outcome = error
        if world.streams and next(tensors, None) is not None:
            world.violated("undrained", f"{self} left its iterator: the other ranks would gather without it ({outcome!r})")
        self.scribble()
        self.publishing = False
        told(self, outcome, world.loop.time() - started)

    def _gathered(self, number: int, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
        world, tensors = self.world, list(zip(MANIFEST, version_bytes(number, self.world.salt), strict=True))
        for spec, content in tensors:
            seconds, kind = world.at_point(self, "place", fast=0.004)
            self.gathers_until = world.loop.time() + seconds
            threads().sleep(seconds)
            if kind == "fail":
                world.trouble(self, timeout)  # the others hear of it in the round, which may begin late
                raise Aborted("gathering was told to fail")
            lent = torch.from_numpy(content.copy())
            yield spec.name, lent.view(torch_dtype(spec.dtype)).view(spec.shape)
            lent.fill_(0)

    def close(self, timeout: float = 5.0) -> None:
        """Leave in good order."""
        self.link.close(timeout)
        self.role.close()

    def crash(self) -> None:
        """See :meth:`Process.crash`. What the operating system would free is freed."""
        super().crash()
        self.world.loop.call_later(0.0, self.role._owned.close)
