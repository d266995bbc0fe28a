"""Random schedules of trainers, readers and garbage collectors over one store that fails, for test_random_store.py.

Real: :class:`StoreWriter`, its objects, the catalog, reading and verifying, :class:`ObjectStore`. Simulated: what obstore does,
time, threads (greenlets, of which a seed says which one goes on), and the coordinator's signing. Every call of the store and every
fault point is a turn: another process may go on, and this one may stall for hours or die there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import obstore
import torch
from greenlet import getcurrent, greenlet
from obstore.exceptions import AlreadyExistsError, GenericError
from tests.simulation.installation import replaced
from tests.unit.store.stored import RUN, StoringTrainer, change

import weightsync.deadline
import weightsync.model.stored
from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, PeerLost, StaleSource, WeightSyncError
from weightsync.model import Version
from weightsync.model.stored import StoredObject
from weightsync.protocol.messages import Body, Done
from weightsync.protocol.store_messages import ManifestStored, SignedManifest, StorePart
from weightsync.store import catalog, region, writer
from weightsync.store.catalog import collect_garbage, load, newest, orders
from weightsync.store.objects import ObjectStore
from weightsync.store.restore import tensors_of
from weightsync.store.signing import SigningKey, StoredVersion, new_secret, opened
from weightsync.store.writer import PublishedBytes, StoreWriter

URL = "s3://bucket/prefix"
_SECONDS = 600.0
_LONG = 1e6
_CHUNK = 16 << 10
_PAGE = 3
_FAULTS = ("fails", "answer lost", "slow", "stalls", "dies")
Content = Mapping[str, bytes]


class Died(BaseException):
    """The process of this greenlet is dead."""


class Process:
    """Greenlets that die together."""

    def __init__(self, name: str) -> None:
        self.name, self.dead = name, False


@dataclass(eq=False)
class _Actor:
    process: Process
    body: Callable[[], None]
    ready: Callable[[], bool]
    until: float = _LONG
    excused: bool = False
    """Whether a fault has struck what it does now."""

    def __post_init__(self) -> None:
        self.greenlet = greenlet(self._run)

    def _run(self) -> None:
        try:
            self.body()
        except Died:
            self.process.dead = True


class _File:
    def __init__(self, data: bytes, modified: float) -> None:
        self.data, self.modified, self.spoiled = data, modified, False


class _Jobs:
    """The writer's queue, whose reader is a greenlet."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._jobs = schedule, list[Any]()

    def put(self, job: Any) -> None:
        self._jobs.append(job)

    def empty(self) -> bool:
        return not self._jobs

    def get(self) -> Any:
        self._schedule.wait(lambda: bool(self._jobs))
        return self._jobs.pop(0)


class _Inline:
    """In place of threads that fetch: the one who asks does it."""

    def __init__(self, most: int, name: str) -> None:
        self.close = lambda: None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        try:
            work()
            future.set_result(None)
        except Exception as error:  # noqa: BLE001 - the caller's to see
            future.set_exception(error)
        return future


class Schedule:
    """What happens with one seed. :attr:`wrong` says what must not have happened."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.wrong: list[str] = []
        self.injected: Counter[str] = Counter()
        self.contents: dict[tuple[tuple[int, int], str], Content] = {}
        """By order and digest, what was published."""
        self.files: dict[str, _File] = {}
        self.key = SigningKey(new_secret())
        self._rate = self.random.choice((0.0, 0.01, 0.04, 0.1)) if faults else 0.0
        self._lying = faults and self.random.random() < 0.3
        """Whether the store may keep less than it was given, and say nothing."""
        self._hub = getcurrent()
        self._actors: list[_Actor] = []
        self._current: _Actor | None = None

    # Turns.

    def start(self, process: Process, body: Callable[[], None]) -> None:
        self._actors.append(_Actor(process, body, lambda: True))

    def run(self) -> None:
        """Until no process is left."""
        while self._actors:
            ready = [actor for actor in self._actors if actor.process.dead or actor.ready() or self.now >= actor.until]
            if not ready:
                self.now = min(actor.until for actor in self._actors)
                continue
            actor = self._current = self.random.choice(ready)
            self.now += self.random.uniform(0, 5)
            actor.greenlet.switch()
            self._current = None
            if actor.greenlet.dead:
                self._actors.remove(actor)

    def wait(self, ready: Callable[[], bool], seconds: float = _LONG) -> bool:
        """Let others go on until ``ready``, or so long. Returns whether it is."""
        actor = self._current
        if actor is None:
            return ready()
        actor.ready, actor.until = ready, self.now + seconds
        self._hub.switch()
        if actor.process.dead:
            raise Died
        return ready()

    def turn(self, what: str) -> str | None:
        """Let others go on. Returns the fault that strikes ``what`` here, if it is one of a call."""
        actor = self._current
        if actor is None:
            return None
        self.wait(lambda: True)
        point = what.startswith("store.") and what != "store.call"
        if self.random.random() >= (3 * self._rate if point else self._rate):
            return None
        fault = self.random.choice(("stalls", "dies") if point else _FAULTS)
        self.injected[fault] += 1
        actor.excused = True
        if fault == "dies":
            actor.process.dead = True
            raise Died
        if fault in ("slow", "stalls"):
            self.wait(lambda: False, self.random.uniform(10, 3 * catalog.GRACE_SECONDS if point else 100))
            return None
        return fault

    @contextmanager
    def excuses(self) -> Iterator[Callable[[], bool]]:
        """Whether a fault struck inside."""
        actor = self._current
        if actor is None:
            yield lambda: False
            return
        actor.excused = False
        yield lambda: actor.excused

    # The store.

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        fault = self.turn(what)
        if fault == "fails":
            raise GenericError(f"the simulated store fails: {what}")
        yield
        if fault == "answer lost":
            raise GenericError(f"the simulated store's answer is lost: {what}")

    def put(self, _store: object, path: str, data: bytes | Iterable[bytes], *, mode: str = "overwrite", **_: object) -> None:
        began = self.now
        if not isinstance(data, bytes):
            pieces = []
            for piece in data:
                pieces.append(piece)
                with self.call("put a part"):
                    pass
            data = b"".join(pieces)
        with self.call("put"):
            if mode == "create" and path in self.files:
                raise AlreadyExistsError(path)
            file = self.files[path] = _File(data, began)
            if self._lying and self.random.random() < 0.05:
                self.injected["torn"] += 1
                file.data, file.spoiled = data[: self.random.randrange(len(data))], True

    def get_range(self, _store: object, path: str, *, start: int, end: int) -> bytes:
        with self.call("get"):
            data = self._file(path).data[start:end]
        if self._lying and self._current is not None and len(data) and self.random.random() < 0.01:
            self.injected["flipped"] += 1
            self._current.excused = True
            wrong = bytearray(data)
            wrong[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            return bytes(wrong)
        return data

    def head(self, _store: object, path: str) -> dict[str, int]:
        with self.call("head"):
            return {"size": len(self._file(path).data)}

    def list(self, _store: object, prefix: str | None = None) -> Iterator[list[dict[str, object]]]:
        late = self._current is not None and self.random.random() < self._rate
        seen_until = self.now - self.random.uniform(0, 1000) if late else _LONG
        self.injected["listed late"] += late
        last = ""
        while True:
            with self.call("list"):
                page = [
                    {"path": path, "size": len(file.data), "last_modified": self.date(file.modified)}
                    for path, file in sorted(self.files.items())
                    if path > last and path.startswith(f"{prefix}/") and file.modified <= seen_until
                ][:_PAGE]
            if not page:
                return
            last = str(page[-1]["path"])
            yield page

    def delete(self, _store: object, path: str) -> None:
        with self.call("delete"):
            if path.endswith(".safetensors") and path in self.needed():
                self.wrong.append(f"{path} was removed, which a version needs")
            self.files.pop(path, None)

    def _file(self, path: str) -> _File:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    @staticmethod
    def date(now: float) -> datetime:
        return datetime.fromtimestamp(1e9 + now, UTC)

    # What is true, whatever listings and answers say.

    def existing(self) -> dict[tuple[int, int], StoredVersion]:
        """Every version with an intact manifest."""
        found = {}
        for path, file in self.files.items():
            if path.endswith(".manifest") and not file.spoiled:
                epoch, number, _ = path.rpartition("/")[2].split(".")
                found[int(epoch), int(number)] = opened(file.data, self.key.public, RUN, (int(epoch), int(number)))
        return found

    def needed(self) -> set[str]:
        ranks = (rank for version in self.existing().values() for rank in version.stored.ranks)
        return {item.path for rank in ranks for item in rank.chain}

    def check(self, store: ObjectStore, order: tuple[int, int]) -> None:
        """Read a version, which must be what was published; or it is refused, for a reason."""
        path = catalog.manifest_path(RUN, order)
        spoiled = path in self.files and self.files[path].spoiled
        with self.excuses() as excused:
            try:
                version = load(store, RUN, order, self.key.public)
                chains = (item.path for rank in version.stored.ranks for item in rank.chain)
                spoiled |= any(each in self.files and self.files[each].spoiled for each in chains)
                read = {
                    spec.name: data.tobytes() for part in tensors_of(store, version, Deadline(_LONG), 20_000) for spec, data in part
                }
            except StaleSource as error:
                if path in self.files and not excused():
                    self.wrong.append(f"version {order} is listed and lacks an object: {error}")
            except AuthenticationError as error:
                if not (spoiled or excused()):
                    self.wrong.append(f"version {order} is refused: {error}")
            except WeightSyncError as error:
                if not (spoiled or excused()):
                    self.wrong.append(f"version {order} cannot be read: {type(error).__name__}: {error}")
            else:
                if read != self.contents[order, version.version.digest]:
                    self.wrong.append(f"version {order} is not what was published")


class SimulatedTrainer:
    """A trainer process of some ranks that changes its weights, publishes and stores; and the coordinator that signs for it."""

    def __init__(self, schedule: Schedule, epoch: int, number: int, versions: int, *, ranks: int, keep: int | None) -> None:
        self.schedule, self.epoch, self.number, self._versions = schedule, epoch, number, versions
        self.process = Process(f"trainer of epoch {epoch}")
        self.draw = random.Random(schedule.random.random())
        seed = self.draw.randrange(1 << 30)
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            "embed": torch.randn(160, 64, generator=generator),
            "codes": torch.randint(0, 255, (33, 31), generator=generator, dtype=torch.uint8),
            "scale": torch.randn(7, generator=generator).bfloat16(),
        }
        self.trainer = StoringTrainer(URL, self.state, ranks, every=self.draw.choice((2, 3, 16)), epoch=epoch)
        self.trainer.key = schedule.key
        self.placed: tuple[Version, Any] | None = None
        self.chains: dict[int, tuple[StoredObject, ...]] = {}
        self.signed: bytes | None = None
        self.told: Version | None = None
        self.failed = False
        self.stamps = [0] * ranks
        self.writers = []
        for number_of, rank in enumerate(self.trainer.ranks):
            made = StoreWriter(rank.objects, self.trainer.store, number_of, self._caller(number_of), _SECONDS, keep)
            made._jobs = _Jobs(schedule)  # type: ignore[assignment]
            made._thread = SimpleNamespace()  # type: ignore[assignment]
            self.writers.append(made)
            schedule.start(self.process, made._run)
        schedule.start(self.process, self._train)

    def _train(self) -> None:
        for _ in range(self._versions):
            self.publish()
            if self.draw.random() < 0.5:
                self._wait_until_stored()
            else:
                self.schedule.wait(lambda: False, self.draw.choice((0.1, 10.0, 100.0)))
        self._wait_until_stored()
        for made in self.writers:
            made._jobs.put(None)

    def _wait_until_stored(self) -> None:
        self.schedule.wait(lambda: all(made._last_over.is_set for made in self.writers), 10 * _SECONDS)
        self._check_writers()

    def _check_writers(self) -> None:
        """What a writer says of its last version is true, unless the store said something else."""
        first, version = self.writers[0], self.placed[0] if self.placed else None
        if version is not None and first._last_over.is_set and first.last == version and self.told != version:
            self.schedule.wrong.append(f"version {version} is said to be stored, and its coordinator does not know")

    def publish(self) -> None:
        if self.draw.random() < 0.9:
            change(self.state, self.draw.choice((0.0, 0.001, 0.02, 0.5)), self.draw.randrange(1 << 30))
        self.number += self.draw.choice((1, 1, 1, 3))
        version, totals = self.trainer.place(self.number, self._rank_begins)
        self.schedule.wait(lambda: False, self.draw.choice((0.0, 0.0, 50.0, 200.0)))
        self.placed = version, totals
        self.chains, self.signed, self.failed = {}, None, False
        content = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in self.state.items()}
        self.schedule.contents[version.order, version.digest] = content
        for rank, made in zip(self.trainer.ranks, self.writers, strict=True):
            published = rank.published()
            made.store(version, None, PublishedBytes(published.payload, published.changed, self._check(made)))

    def _rank_begins(self, rank: int) -> None:
        """From now on its region holds another version, and the coordinator does not know."""
        self.schedule.wait(lambda: False, self.draw.choice((0.0, 0.0, 50.0, 200.0)))
        self.stamps[rank] += 1

    def _check(self, made: StoreWriter) -> Callable[[], None]:
        stamp = self.stamps[made._rank]

        def check() -> None:
            if self.stamps[made._rank] != stamp:
                raise StaleSource("the region holds another version")

        return check

    def _caller(self, rank: int) -> Callable[[Body, float], Body]:
        def call(body: Body, seconds: float) -> Body:
            fault = self.schedule.turn("store.call")
            if fault == "fails":
                raise PeerLost("the simulated coordinator is gone")
            answer = self._answer(rank, body, seconds)
            if fault == "answer lost":
                raise PeerLost("the simulated coordinator's answer is lost")
            return answer

        return call

    def _answer(self, rank: int, body: Body, seconds: float) -> Body:
        assert self.placed is not None
        version, totals = self.placed
        if isinstance(body, ManifestStored):
            if (body.epoch, body.number) != version.order or self.signed is None:
                raise StaleSource("that is not what is gathered now")
            self.told = version
            return Done()
        assert isinstance(body, StorePart)
        if (body.epoch, body.number) != version.order or self.failed:
            raise StaleSource("that is not what the trainer holds now")
        self.chains[rank] = body.chain
        if len(self.chains) == len(self.trainer.ranks) and self.signed is None:
            chains = [self.chains[each] for each in range(len(self.chains))]
            self.signed = self.trainer.key.signed(self.trainer.described(version, totals, chains))

        def gathered() -> bool:
            return self.signed is not None if rank == 0 else self.told == version

        def over() -> bool:
            return gathered() or self.failed or self.placed is None or self.placed[0] != version

        self.schedule.wait(over, seconds)
        if self.placed[0] != version or self.failed or not gathered():
            if self.placed[0] == version:
                self.failed = True
            raise DeadlineExceeded("the other ranks did not store their parts")
        return SignedManifest(self.signed or b"", self.trainer.key.public) if rank == 0 else Done()


def _read(schedule: Schedule, times: int) -> None:
    store = ObjectStore(URL)
    for _ in range(times):
        schedule.wait(lambda: False, schedule.random.uniform(0, 300))
        try:
            if schedule.random.random() < 0.5:
                version = newest(store, RUN, schedule.key.public)
                order = None if version is None else version.version.order
            else:
                listed = orders(store, RUN)
                order = schedule.random.choice(listed) if listed else None
        except WeightSyncError:
            continue
        if order is not None:
            schedule.check(store, order)


def _collect(schedule: Schedule, times: int) -> None:
    store = ObjectStore(URL)
    for _ in range(times):
        schedule.wait(lambda: False, schedule.random.choice((10.0, 1000.0, 5000.0)))
        try:
            collect_garbage(store, RUN, schedule.key.public, schedule.random.choice((1, 1, 2, 4)))
        except WeightSyncError:
            continue


@contextmanager
def simulated(schedule: Schedule) -> Iterator[None]:
    """Let the store of this process be the schedule's, and its time."""
    clock = SimpleNamespace(monotonic=lambda: schedule.now)
    names = SimpleNamespace(token_hex=lambda nbytes: schedule.random.randbytes(nbytes).hex())
    dates = SimpleNamespace(now=lambda zone: schedule.date(schedule.now))
    functions = ((obstore, name, getattr(schedule, name)) for name in ("put", "get_range", "head", "list", "delete"))
    with replaced(
        *functions,
        (ObjectStore, "_store", None),
        (weightsync.deadline, "time", clock),
        (catalog, "datetime", dates),
        (catalog, "secrets", names),
        (region, "DaemonThreads", _Inline),
        (failpoints, "_gate", schedule.turn),
        *((module, "CHUNK_BYTES", _CHUNK) for module in (weightsync.model.stored, region, writer)),
        (region, "_BATCH_BYTES", 2 * _CHUNK),
    ):
        yield


def run_schedule(seed: int, *, faults: bool = True) -> Schedule:
    """Run one schedule, then look at what is left, and go on with it. Returns it."""
    schedule = Schedule(seed, faults=faults)
    draw = schedule.random
    with simulated(schedule):
        last, epoch = 0, 1
        for _ in range(draw.choice((1, 2, 3))):  # acts: what was left by dead processes is there
            trainers = []
            for index in range(draw.choice((1, 1, 2))):
                epoch += index or draw.random() < 0.3
                keep = draw.choice((None, 1, 2))
                trainers.append(SimulatedTrainer(schedule, epoch, last, draw.randrange(1, 6), ranks=draw.choice((1, 2)), keep=keep))
            for body in (_read, _collect):
                schedule.start(Process(body.__name__), lambda body=body: body(schedule, draw.choice((0, 2, 4, 8))))  # type: ignore[misc]
            schedule.run()
            last = max(last, *(trainer.number for trainer in trainers))
            if draw.random() < 0.2:
                schedule.now += 2 * catalog.GRACE_SECONDS
            store = ObjectStore(URL)
            for order in orders(store, RUN):
                schedule.check(store, order)
        schedule._rate, schedule._lying = 0.0, False
        trainer = SimulatedTrainer(schedule, epoch + 1, last, 1, ranks=2, keep=None)
        schedule.run()
        found = newest(store, RUN, schedule.key.public)
        if trainer.placed is None or found is None or found.version != trainer.placed[0]:
            schedule.wrong.append(f"the newest version is {found and found.version}, not the one that was stored without faults")
        else:
            schedule.check(store, found.version.order)
            schedule.now += 2 * catalog.GRACE_SECONDS
            collect_garbage(store, RUN, schedule.key.public, 1)
            if schedule.files.keys() != found.objects.keys() | {catalog.manifest_path(RUN, found.version.order)}:
                schedule.wrong.append(f"garbage is left: {sorted(schedule.files)}")
    return schedule
