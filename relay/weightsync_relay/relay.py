"""A trainer without a model: it follows a store of versions and publishes them again, for engines far from the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from msgspec import structs

from weightsync import failpoints
from weightsync.closing import Closeable
from weightsync.daemon_threads import DaemonThreads
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationError,
    DeadlineExceeded,
    ProtocolError,
    RoundFailed,
    SharedMemoryTooSmall,
    StaleSource,
    VerificationError,
    VersionError,
    WeightSyncError,
)
from weightsync.model import Box, Manifest, Version
from weightsync.outcome import Latch, Outcome
from weightsync.planning.coverage import coverage_of
from weightsync.protocol.messages import Hello, Publish, RoundResult, Welcome
from weightsync.protocol.store_messages import RelayFailing
from weightsync.store.catalog import load, orders, why_empty
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import StoredVersion
from weightsync.tensors.copies import digest_memory
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import Shard, ShardedState, torch_dtype
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import Placing
from weightsync.transports.host.memory import available_bytes
from weightsync_relay.kept_region import KeptRegion

_LONGEST_PAUSE = 60.0  # seconds between two attempts, unless the interval is longer
_SLACK = 60.0  # seconds for a read to notice its own deadline
_TELLING_SECONDS = 5.0
_REASON_CHARS = 4000
_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has


def _form(stored: StoredVersion) -> tuple[str, list[str]]:
    """Equal for versions with the same boxes at the same places."""
    return stored.version.manifest, [layout.digest for layout in stored.layouts]


class _StoredState(ShardedState):
    """The distinct boxes of all ranks that stored a version, in memory of this process."""

    def __init__(self, store: ObjectStore, stored: StoredVersion) -> None:
        self.form, self._manifest = _form(stored), stored.manifest
        needed, free = self._manifest.nbytes, available_bytes()
        if free is not None and free < needed:
            raise SharedMemoryTooSmall(f"a relay keeps the weights in host memory, {needed:,} bytes, and {free:,} are available")
        self._regions: dict[int, KeptRegion] = {}  # by rank; not of ranks that hold only copies
        boxes: dict[tuple[int, Box], Shard] = {}
        for rank, layout in enumerate(stored.layouts):
            mine = [(int(layout.tensor[row]), layout.box(row, self._manifest)) for row in range(len(layout))]
            if boxes.keys() >= set(mine):
                continue
            region = self._regions[rank] = KeptRegion(store, layout.regions[0])
            for (tensor, box), first in zip(mine, layout.offset.tolist(), strict=True):
                spec = self._manifest[tensor]
                dtype = torch_dtype(spec.dtype)
                memory = torch.from_numpy(region.memory[first : first + box.size * dtype.itemsize])
                boxes.setdefault((tensor, box), Shard(spec.name, spec.shape, box, memory.view(dtype).view(box.shape)))
        self._shards = [boxes[key] for key in sorted(boxes, key=lambda key: key[0])]
        self._layout, self._addresses = layout_in_place(self._manifest, self._shards)
        self._coverage = coverage_of(self._manifest, {"relay": self._layout}, "the store")

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """See :class:`~weightsync.tensors.shards.ShardedState`."""
        return self._manifest, self._shards

    def holds(self, stored: StoredVersion) -> bool:
        """Whether the memory has this version."""
        return all(region.chain == stored.stored.ranks[rank].chain for rank, region in self._regions.items())

    def update(self, stored: StoredVersion, deadline: Deadline) -> None:
        """Have this version in memory, verified against its digests. Raises what :meth:`KeptRegion.update` raises."""
        for rank, region in self._regions.items():
            region.update(stored.stored.ranks[rank].chain, deadline)
            failpoints.reached("relay.read")
        digests = digest_memory(self._manifest, self._layout, self._addresses)
        try:
            self._coverage.check({"relay": digests}, stored.digests)
        except VerificationError:
            for region in self._regions.values():
                region.chain = ()
            raise


class _RelayTrainer(Trainer):
    """Publishes versions under the labels that they have already, and perhaps one again."""

    _stores = False

    def __init__(self, state: _StoredState, first: Version, coordinator: str, token: str | None, deltas: bool) -> None:
        self.state, self.first, self.signed, self.welcomes = state, first, first, 0
        super().__init__(state, coordinator, token=token, rank=0, world_size=1, run=first.run, deltas=deltas)

    def _hello(self) -> Hello:
        hello = super()._hello()
        # The signature vouches for the digest, so the coordinator holds replicas and this publisher to it.
        return structs.replace(hello, epoch=self.first.epoch, version=hello.version or self.first)

    def _welcomed(self, welcome: Welcome) -> None:
        super()._welcomed(welcome)
        self.welcomes += 1

    def _ask(self, wanted: Publish, deadline: Deadline, placing: Placing) -> RoundResult:
        return super()._ask(structs.replace(wanted, version=self.signed), deadline, placing)

    def tell(self, reason: str) -> None:
        """Tell the coordinator why no newer version comes, or by an empty text that they come again."""
        with suppress(WeightSyncError):
            self._link.call(RelayFailing(reason), _TELLING_SECONDS)


class Relay(Closeable):
    """Publishes the newest version of ``run`` in ``store`` to the replicas of another coordinator, under the same label.

    Host memory: twice the model, and with ``deltas`` a third time. While the store fails, replicas keep their version, and late
    ones get it from this process. Versions that are stored while one is read or published are skipped, except the last.

    Args:
        store: The store.
        run: Id of the run, which the coordinator has, too.
        public: Public half of the run's key, 32 bytes.
        coordinator: URL of the coordinator of these replicas.
        token: Its token; ``None``: as for a :class:`~weightsync.Trainer`.
        deltas: Let replicas read only words that changed, see :class:`~weightsync.Trainer`.
        interval: Seconds between two looks at the store. After failures they are up to 60 s apart.
        timeout: Seconds for reading one version.
    """

    def __init__(
        self, store: ObjectStore, run: str, public: bytes, coordinator: str, *, token: str | None = None, deltas: bool = False,
        interval: float = 10.0, timeout: float = 3600.0,
    ) -> None:  # fmt: skip
        self._store, self._run, self._public, self._interval, self._timeout = store, run, public, interval, timeout
        self._join = partial(_RelayTrainer, coordinator=coordinator, token=token, deltas=deltas)
        self._threads = DaemonThreads(1, "weightsync-relay")
        self._reading: Outcome[None] | None = None
        self._state: _StoredState | None = None
        self._stored: StoredVersion | None = None
        """The last version that was in memory whole."""
        self._trainer: _RelayTrainer | None = None
        self._published: tuple[Version, int] | None = None
        """The last version that was published, and the connection by which."""
        self._tried: Version | None = None
        """What the last turn read, or failed to read."""
        self._waits = False
        self._stop = Latch()

    def follow(self, *, once: bool = False) -> None:
        """Publish each newer version, until :meth:`close`. With ``once``, publish the newest one and return.

        Raises:
            WeightSyncError: Any error with ``once``; otherwise only that the coordinator could not be joined at first, or that
            nothing in the store is signed with the key.
        """
        failing, pause = "", self._interval
        while not self._stop.is_set:
            before, failing = failing, ""
            try:
                self._turn(once)
                pause = self._interval
            except WeightSyncError as error:
                if once or self._cannot_begin(error):
                    raise
                failing = f"{type(error).__name__}: {error}{f' (version {self._tried})' if self._tried else ''}"
                pause = min(2 * pause, max(self._interval, _LONGEST_PAUSE))
            if failing != before and not self._stop.is_set:  # what it was doing fails when it is closed
                text = f"no newer version comes: {failing}. Next attempt in {pause:g} s" if failing else "versions come again"
                level = (logging.WARNING if before else logging.ERROR) if failing else logging.INFO
                _log.log(level, "store %s: %s", self._store.url, text)
            if self._trainer is not None and (failing or before):
                self._trainer.tell(failing[:_REASON_CHARS])
            if once or self._stop.wait(pause):
                return

    def _cannot_begin(self, error: WeightSyncError) -> bool:
        """Whether somebody must correct the key, or the coordinator's address or token."""
        joined = self._trainer is not None or self._published is not None
        return isinstance(error, AuthenticationError) if self._stored is None else not joined

    def _turn(self, once: bool) -> None:
        if self._reading is None:
            self._reading = Outcome()
            self._threads.submit(partial(self._reading.run, self._read))
        if not self._reading.over.wait(self._timeout + _SLACK):  # it goes on: no other may change the memory
            raise DeadlineExceeded("it does not answer")
        reading, self._reading = self._reading, None
        try:
            reading.result()
            if self._stored is None:
                if once:
                    raise StaleSource(why_empty(self._store, self._run))
                if not self._waits:
                    _log.info("waiting for the first version of run %s: %s", self._run, why_empty(self._store, self._run))
                self._waits = True
        finally:  # a coordinator that was restarted needs the last version, also while the store fails
            if self._stored is not None and self._state is not None and self._state.holds(self._stored):
                self._publish(self._stored, self._state, once)

    def _read(self) -> None:
        """Have the newest version in memory. What is not signed with the run's key is an error if there is nothing newer.

        At first, one that is damaged gives way to an older one, and is the error.
        """
        failure, held, newest, damaged = None, self._stored, None, None
        spoiled = set[str]()  # paths of objects that cannot be used
        before, self._tried = self._tried, None
        listed = orders(self._store, self._run)
        for order in reversed(listed):
            if newest is not None or (held is not None and (damaged is not None or order <= held.version.order)):
                break
            try:
                newest = load(self._store, self._run, order, self._public)
            except WeightSyncError as error:
                # The key is wrong only if every manifest says so.
                failure = failure if failure and isinstance(error, AuthenticationError) else error
                continue
            if not spoiled.isdisjoint(newest.objects):
                newest = None  # it needs the same object, which may be large
                continue
            try:
                self._hold(newest, before)
            except (ProtocolError, StaleSource, VerificationError) as error:
                if damaged is None:
                    failure, damaged = error, newest.version
                spoiled.update(path for path in newest.objects if path in str(error))
                newest = None
        # A damaged one may have replaced the last version in memory. It is read again for a coordinator that has not got it.
        joined = None if self._trainer is None else self._trainer.welcomes
        if newest is None and held is not None and (damaged is None or self._published != (held.version, joined)):
            self._hold(held, before)
        if failure is not None and (newest is None or damaged is not None):
            self._tried = damaged or self._tried
            raise failure
        if held is not None and (not listed or listed[-1] < held.version.order):
            raise VersionError(f"the store went back: its newest version is older than {held.version}, which was published")

    def _hold(self, stored: StoredVersion, before: Version | None) -> None:
        """Bring this version into memory. The log has that once: ``before`` is what the last turn tried."""
        state = self._state
        if state is None or state.form != _form(stored):
            state = _StoredState(self._store, stored)
        if self._stored is None:
            self._state = state  # an older version may begin with the same objects
        if not state.holds(stored):
            failpoints.reached("relay.reading")
            self._tried = stored.version
            level = logging.DEBUG if before == self._tried else logging.INFO
            _log.log(level, "reading version %s: %d objects, less those in memory", stored.version, len(stored.objects))
            state.update(stored, Deadline(self._timeout))
            failpoints.reached("relay.verified")
        self._state, self._stored = state, stored

    def _publish(self, stored: StoredVersion, state: _StoredState, once: bool) -> None:
        version, trainer = stored.version, self._trainer
        if trainer is not None and (trainer.state is not state or trainer.first.epoch != version.epoch):
            self._trainer = None
            trainer.close()
        trainer = self._trainer = self._trainer or self._join(state, version)
        if self._stop.is_set:  # by another thread, which may not have seen the trainer
            trainer.close()
            return
        this = version, trainer.welcomes
        if self._published == this:
            return
        trainer.signed = version
        try:
            trainer.publish(version.number, step=stored.stored.step)
        except VersionError as error:  # perhaps of a false claim, which may be withdrawn: only the coordinator knows
            raise VersionError(f"its newest version is {version}, which cannot be published here: {error}") from None
        except RoundFailed as error:
            if once or trainer.version != version:
                raise
            _log.warning("%s", error)  # the coordinator updates the others from here
        if trainer.version != version:
            raise VerificationError(f"version {trainer.version} was published with other digests than version {version} has")
        self._published = this
        failpoints.reached("relay.published")

    def close(self) -> None:
        """Leave the coordinator. Replicas keep what they have. Safe twice, and from another thread."""
        self._stop.set()
        self._threads.close()
        if self._trainer is not None:
            self._trainer.close()
