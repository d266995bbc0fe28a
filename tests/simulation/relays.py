"""A world of two regions: at home a trainer stores its versions, far away a relay follows the store and feeds the replicas."""

from __future__ import annotations

import random
import secrets
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from msgspec import msgpack, structs
from tests.simulation.coordination import GRACE, CoordinatorProcess
from tests.simulation.installation import replaced
from tests.simulation.object_store import RUN, SIGNED_BODY, STORE_URL
from tests.simulation.ranks import _SETTINGS, Agent, EngineProcess, Process, TrainerProcess, _Link, _Placer
from tests.simulation.store_world import _CHUNK, _KEY, StoreWorld, _Daemons, _digest, _Storing
from tests.simulation.threads import Executor, Lock, Thread
from tests.simulation.weights import Sharing

from weightsync.config import RoundSettings, Secret, Timeouts
from weightsync.coordinator import Coordinator
from weightsync.errors import CoordinatorUnreachable, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Version
from weightsync.model.stored import VersionManifest
from weightsync.protocol.messages import Body, RoundResult, Welcome
from weightsync.protocol.round_log import MissedReplicas
from weightsync.protocol.worker import received_for
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import ShardOptions
from weightsync.store.objects import ObjectStore
from weightsync.trainer.background import wait_until_free
from weightsync.trainer.requests import PublishRequests
from weightsync.trainer.storing import Storing
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.host.region import PublishedRegion
from weightsync_relay import kept_region, relay
from weightsync_relay.relay import Relay, _RelayTrainer, _StoredState

__all__ = ["RELAY_STATES", "RelayWorld", "with_relay"]

_JOINING_SECONDS = 10.0
_CLOSING_SECONDS = 10.0
_READING_SECONDS = 40.0
_TIMEOUTS = Timeouts(reconnect=2.0, connect=_JOINING_SECONDS, publish=60.0)
_RELAY_SETTINGS = structs.replace(_SETTINGS, timeouts=_TIMEOUTS)
_UNKNOWN = -2
"""No content at all."""

RELAY_STATES = (
    "relay published",
    "relay read changes",
    "relay could not read",
    "relay went on to another epoch",
    "relay refused",
    "relay feeds while the trainer is away for good",
)


class _Far(_Link):
    """A relay's link: making one waits for the coordinator's welcome, as the real one does."""

    def connect(self) -> Welcome:
        try:
            self.process.spawn(self._guard())
            if not self._first.over.wait(_JOINING_SECONDS + 2.0):
                raise CoordinatorUnreachable("the simulated coordinator did not answer in time")
            return self._first.result()
        except BaseException:
            self.close()
            raise

    async def _guard(self) -> None:
        try:
            await self._stay()
        except WeightSyncError as error:
            self._first.fail(error)
        finally:
            self._loop = None
            for asked in list(self._asked):
                asked.cancel()
            self._ended.set()

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self._ended.wait(timeout)


class _RelayedTrainer(_RelayTrainer):
    """The real one, made as a simulated trainer rank is."""

    def __init__(self, state: _StoredState, first: Version, coordinator: str, token: str | None, deltas: bool) -> None:
        self.state, self.first, self.signed, self.welcomes = state, first, first, 0
        process = _process_of_this_thread()
        world = self.world = process.world
        world.now_starting = process
        access = ReaderAccess([world.scheme], world.key, process.host)
        role = TrainerRole(state, access, ShardOptions(deltas=world.deltas))
        role._placer = _Placer(process, role._placer)
        if not isinstance(role.region, PublishedRegion):
            raise RuntimeError("a simulated relay publishes from host memory")
        process.stale = np.zeros(max(role.region.nbytes, 1), np.uint8)
        fields = {
            "rank": 0, "world_size": 1, "_run": first.run, "_session": Secret(world.session()), "_published": -1, "_seeds": True,
            "_host": process.host, "_origin": Origin(), "_role": role, "_publishing": Lock(), "_settings": _RELAY_SETTINGS,
            "_background": Executor(1, "publish"), "_asked": None, "_offload": None, "_restore": None, "_new_epoch": False,
            "_last": -1, "_calls": secrets.randbits(48), "_missed": MissedReplicas(relay._log), "_requests": PublishRequests(None),
        }  # fmt: skip
        vars(self).update(fields)
        with ExitStack() as owned:
            owned.callback(role.close)
            owned.callback(wait_until_free, self._publishing, _CLOSING_SECONDS)
            self._link = _Far(
                _RELAY_SETTINGS,
                hello=self._hello,
                receive=received_for(role.handle),
                on_welcome=self._welcomed,
                name=process.member,
            )
            self._link.process = process
            owned.callback(self._link.close)
            self._storing = Storing(_RELAY_SETTINGS, role, 0, self._link.call)
            process.roles.append(role)
            self._link.connect()
            self._owned = owned.pop_all()
        world.seen["relay went on to another epoch"] += process.epoch not in (0, first.epoch)
        process.epoch = first.epoch

    def close(self) -> None:
        self.world.trouble(self.world.current(), 0.0)  # whoever reads from it
        super().close()


class RelayProcess(Agent):
    """``weightsync relay``: the real :class:`~weightsync_relay.relay.Relay` over the simulated bucket."""

    world: RelayWorld

    def __init__(self, world: RelayWorld, number: int) -> None:
        super().__init__(world, "relay", number, 1)
        self.roles: list[TrainerRole] = []
        self.epoch = 0
        self.leaves = False
        draw = world.relaying
        self.relay = Relay(
            ObjectStore(STORE_URL), RUN, _KEY.public, "http://127.0.0.1:7400", deltas=bool(world.deltas),
            interval=draw.choice((0.5, 5.0, 10.0)), timeout=draw.choice((5.0, _READING_SECONDS)),
        )  # fmt: skip
        Thread(self._follow, f"{self.member} follows", owner=self).start()

    def _follow(self) -> None:
        try:
            self.relay.follow()
        except WeightSyncError as error:
            self.world.seen["relay refused"] += 1
            self.world.seen[f"relay refused: {type(error).__name__}"] += 1
        if not self.leaves:
            self.crash()
            self.world.restart_later(self)

    def close(self, timeout: float = 5.0) -> None:
        self.leaves = True
        self.relay.close()

    def crash(self) -> None:
        super().crash()
        self.relay._stop._set = True
        for role in self.roles:
            self.world.loop.call_later(0.0, role._owned.close)


class _HomeTrainer(Trainer):
    """Notes the labels that there are at home, before anything is stored."""

    world: RelayWorld

    def _finished(self, answer: Body) -> RoundResult:
        version = getattr(answer, "result", None)
        if version is not None:
            self.world.labels.add(version.version)
        return super()._finished(answer)


class _HomeRank(_Storing):
    """A trainer rank at home."""

    _class = _HomeTrainer
    world: RelayWorld

    def __init__(self, world: RelayWorld, rank: int, ranks: int, sharing: Sharing) -> None:
        super().__init__(world, rank, ranks, sharing)
        vars(self.trainer).update(world=world, _new_epoch=world.epochs > 0)


class HomeCoordinator(CoordinatorProcess):
    """The coordinator of the trainer, without a replica."""

    world: RelayWorld

    def __init__(self, world: RelayWorld) -> None:
        super().__init__(world)
        self.member = "home"

    def _make_coordinator(self) -> Coordinator:
        settings = RoundSettings(run=RUN, grace=GRACE, timeout=120.0, require=0)
        return Coordinator(settings, lambda: _KEY)

    def crash(self) -> None:
        self.alive = False
        self.world.home = None
        for wire in self.wires:
            wire.lose(self.world.notice(), 0.0)
        self.world.loop.create_task(self.coordinator.aclose())

    def leave(self) -> None:
        """In good order."""
        self.world.home = None

        async def close() -> None:
            await self.coordinator.aclose()
            await self.sockets.aclose("the coordinator shuts down")
            self.alive = False

        self.world.loop.create_task(close())


def _process_of_this_thread() -> RelayProcess:
    from tests.simulation.threads import threads

    process = threads().process()
    if not isinstance(process, RelayProcess):
        raise RuntimeError(f"{process} is no relay")
    return process


class RelayWorld(StoreWorld):
    """See the module. ``trainers`` are at home, ``coordinator`` and ``engines`` far away, and relays are ``publishers``."""

    store_key: Any = None  # far away; that of home is its coordinator's

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.relaying = random.Random(f"relaying {seed}")
        self.home: HomeCoordinator | None = None
        self.labels: set[Version] = set()
        """Versions that were published at home."""
        self.epochs = 0
        """New epochs that the trainer has begun."""
        self.over = False
        """All leave."""
        self.unaware = False
        """The store did not list its newest version when a coordinator at home started: a later one may have a lower number."""
        self._before_epoch = 0
        self._contents: dict[str, int] = {}

    # Two epochs use the same numbers for different contents, and contents are counted on.

    def label_of(self, content: int) -> int:
        return content - self._before_epoch

    def name_of(self, version: Version) -> Hashable:
        return version.order

    def meaning(self, version: Version, content: int | None) -> int:
        for number in self.numbers:
            self._contents.setdefault(_digest(number, self.salt), number)
        return self._contents.get(version.digest, _UNKNOWN)

    def begin_epoch(self, content: int) -> None:
        """The trainer that starts next uses numbers again: ``content`` was published last."""
        self.epochs += 1
        self._before_epoch = content
        self.seen["another epoch at home"] += 1

    # Who is where.

    def coordinator_of(self, process: Process) -> CoordinatorProcess | None:
        return self.home if isinstance(process, TrainerProcess) else self.coordinator

    def sources(self) -> Iterable[Process]:
        return self.publishers.values()

    def excuses(self, started: float) -> bool:
        return False

    def make_trainer(self, rank: int, ranks: int, sharing: str) -> TrainerProcess:
        return _HomeRank(self, rank, ranks, sharing)

    def begin(self, coordinator: CoordinatorProcess) -> None:
        if isinstance(coordinator, HomeCoordinator):
            super().begin(coordinator)
        else:
            coordinator.ready.set()

    async def _adopt(self, coordinator: CoordinatorProcess) -> None:
        await super()._adopt(coordinator)
        newest, stored = self.newest(), coordinator.coordinator.stored
        behind = newest is not None and (stored.newest is None or stored.newest.version.order < newest.version.order)
        if behind and stored.read is None:
            self.unaware = True
            self.seen["coordinator began without the newest stored version"] += 1

    def start_home(self) -> None:
        """A coordinator at home listens."""
        if self.home is None:
            self.home = HomeCoordinator(self)

    def start_relay(self, number: int) -> None:
        """A relay starts far away, and again whenever it dies."""
        self.start_publisher(lambda world: RelayProcess(self, number))

    def relays(self) -> list[RelayProcess]:
        """Those that live."""
        return [one for one in self.publishers.values() if isinstance(one, RelayProcess) and one.alive]

    def _restart(self, dead: Process) -> None:
        if isinstance(dead, HomeCoordinator):
            self.restarting.discard(dead.member)
            self.start_home()
        elif isinstance(dead, RelayProcess) and (self.over or (self.calm and dead.rank)):
            self.restarting.discard(dead.member)
        else:
            super()._restart(dead)

    # What must hold.

    def labelled(self, engine: EngineProcess) -> None:
        version = engine.label
        if version is not None and version not in self.labels:
            self.violated("mislabelled", f"{engine} takes the label {version}, which there never was at home")
        super().labelled(engine)

    def reached(self, point: str) -> None:
        if point == "relay.published":
            self.seen["relay published"] += 1
            self.seen["relay feeds while the trainer is away for good"] += self.calm and self.away
        super().reached(point)

    def newest(self) -> VersionManifest | None:
        """The newest version in the store whose manifest nobody spoiled."""
        paths = [path for path in sorted(self.bucket.files) if path.endswith(".manifest") and path not in self.bucket.spoiled]
        if not paths:
            return None
        return msgpack.decode(self.bucket.files[paths[-1]].data[SIGNED_BODY:], type=VersionManifest)


class _Following(_StoredState):
    """Counts what is read."""

    def update(self, stored: Any, deadline: Any) -> None:
        world, known = _process_of_this_thread().world, any(region.chain for region in self._regions.values())
        try:
            super().update(stored, deadline)
        except WeightSyncError:
            world.seen["relay could not read"] += 1
            raise
        world.seen["relay read changes"] += known


@contextmanager
def with_relay(world: RelayWorld) -> Iterator[None]:
    """Let relays of ``world`` be what the real relay's code makes."""
    with replaced(
        (relay, "_RelayTrainer", _RelayedTrainer),
        (relay, "_StoredState", _Following),
        (relay, "DaemonThreads", _Daemons),
        (kept_region, "DaemonThreads", _Daemons),
        (kept_region, "CHUNK_BYTES", _CHUNK),
        (relay, "available_bytes", lambda: None),
    ):
        yield
