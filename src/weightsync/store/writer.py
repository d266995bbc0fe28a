"""A trainer rank stores what it published, beside training: from its region, on a thread, and never in a round's way."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightsync import failpoints
from weightsync.arrays import Bytes, UInt16, UInt32
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ProtocolError, StaleSource, VersionError, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Layout, Manifest, Version
from weightsync.model.stored import CHUNK_BYTES, StoredObject
from weightsync.outcome import Latch
from weightsync.protocol.messages import Body, ChangedWords, Done
from weightsync.protocol.store_messages import ManifestStored, SignedManifest, StorePart
from weightsync.store.catalog import GRACE_SECONDS, collect_garbage, manifest_path, new_object_path
from weightsync.store.containers import blocks_of, delta_header, key_header, lists_offset
from weightsync.store.fold_kernel import lists_of_region
from weightsync.store.objects import ObjectStore
from weightsync.tensors.changes import Sections

CoordinatorCall = Callable[[Body, float], Body]
"""Calls the coordinator, which must answer within so many seconds."""

_log = logging.getLogger(__name__)

_MOST_UNITS = 1 << 30
"""Of changes that are written as a delta: where lists end is counted in uint32, and a unit becomes at most three words."""


@dataclass(frozen=True, eq=False)
class PublishedBytes:
    """A rank's published region, as far as it holds a version still."""

    payload: Bytes
    """The shards, then the lists of changes."""
    changed: ChangedWords | None
    check: Callable[[], None]
    """Raises :class:`~weightsync.errors.StaleSource` if the region holds another version, or is being written."""


class RankObjects:
    """Writes a trainer rank's objects, and knows the chain of them that the next delta can extend.

    Args:
        store: The store.
        rank: The rank's number.
        manifest: The tensors.
        layout: The layout of the rank's region.
        every: Most objects of a chain: a key frame is written at least so often. Also if the deltas would have more bytes than it.
    """

    def __init__(self, store: ObjectStore, rank: int, manifest: Manifest, layout: Layout, every: int = 16) -> None:
        self._store, self._rank, self._every = store, rank, every
        self._manifest, self._layout = manifest, layout
        self._confirmed: tuple[tuple[int, int], tuple[StoredObject, ...]] | None = None
        """The last version that exists in the store, and its chain."""

    def write(self, version: Version, published: PublishedBytes) -> tuple[StoredObject, ...]:
        """Write the object of ``version``: a key frame if the store has lost an object that a delta needs. Returns its chain.

        Raises:
            StaleSource: The region does not hold the version any more.
            VersionError: The store does not keep what it is given.
            TransportError: The store fails.
        """
        chain = self._extends(published.changed)
        changed, shards = published.changed, published.payload[: self._layout.regions[0]]
        parts: tuple[Bytes, ...]
        if chain and changed is not None:
            ends, lists = self._lists(published.payload, changed)
            published.check()
            gap = np.zeros(lists_offset(len(ends)) - ends.nbytes, np.uint8)
            parts = (ends.view(np.uint8), gap, lists.view(np.uint8))
            header = delta_header(len(ends), len(lists), version, (changed.epoch, changed.number))
        else:
            header, parts = key_header(self._manifest, self._layout, version), (shards,)
        path, hashes = new_object_path(version.run, version.order, self._rank), list[bytes]()
        failpoints.reached("store.object")
        self._store.put(path, _pieces((np.frombuffer(header, np.uint8), *parts), published.check, hashes))
        failpoints.reached("store.object_written")
        nbytes = len(header) + sum(map(len, parts))
        chain = (*chain, StoredObject(path, "delta" if chain else "key", nbytes, len(header), b"".join(hashes)))
        if (lost := next((item.path for item in chain if not self._keeps(item)), None)) is None:
            return chain
        if len(chain) == 1:
            raise VersionError(f"the store does not keep {lost} as it was written")
        _log.warning("the store does not keep %s as it was written: all bytes of version %s are stored", lost, version)
        self._confirmed = None
        return self.write(version, published)

    def _keeps(self, item: StoredObject) -> bool:
        with suppress(StaleSource):
            return self._store.size(item.path) == item.nbytes
        return False

    def _lists(self, payload: Bytes, changed: ChangedWords) -> tuple[UInt32, UInt16]:
        """Ends and lists of the region's blocks, of changes that are listed by shards."""
        nbytes, sections = self._layout.regions[0], Sections.of(self._manifest, self._layout)
        table = np.ascontiguousarray(np.stack([sections.offset, sections.nbytes, sections.word], axis=1))
        ends, lists = np.zeros(blocks_of(nbytes), np.uint32), np.empty(nbytes // 2, np.uint16)
        counts = payload[changed.counts :][: 2 * sections.blocks].copy()  # that no reader of them leaves the lists, if they change
        units = int(sections.list_ends(counts.view(np.uint16))[-1])
        used = -1 if units != changed.units else lists_of_region(
            table.ctypes.data, len(table), counts.ctypes.data, payload[changed.payload :].ctypes.data, payload.ctypes.data, nbytes,
            ends.ctypes.data, lists.ctypes.data,
        )  # fmt: skip
        if used < 0:
            raise StaleSource("the region holds the changes of another version")
        return ends, lists[:used]

    def confirm(self, version: Version, chain: tuple[StoredObject, ...] | None) -> None:
        """The manifest of ``version`` is in the store; without ``chain``, it is not, and the next object is a key frame."""
        self._confirmed = None if chain is None else (version.order, chain)

    def _extends(self, changed: ChangedWords | None) -> tuple[StoredObject, ...]:
        """The chain to which these changes can be added; empty if a key frame must be written."""
        if changed is None or self._confirmed is None or self._confirmed[0] != (changed.epoch, changed.number):
            return ()
        chain = self._confirmed[1]
        deltas = sum(item.nbytes for item in chain[1:]) + 4 * blocks_of(self._layout.regions[0]) + 4 * changed.units
        return chain if len(chain) < self._every and deltas < chain[0].nbytes and changed.units < _MOST_UNITS else ()


def _pieces(parts: Sequence[Bytes], check: Callable[[], None], hashes: list[bytes]) -> Iterator[bytes]:
    """Yield the bytes of all ``parts`` in chunks, each copied while the region held the version, and append their hashes."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    for begin in range(0, ends[-1], CHUNK_BYTES):
        piece = b"".join(
            part[max(begin - end + len(part), 0) : max(begin + CHUNK_BYTES - end + len(part), 0)].data
            for part, end in zip(parts, ends, strict=True)
        )
        check()
        hashes.append(hashlib.sha256(piece).digest())
        failpoints.reached("store.piece")
        yield piece


class _VersionToStore(NamedTuple):
    """A version to store."""

    version: Version
    step: int | None
    published: PublishedBytes
    over: Latch


class StoreWriter:
    """Stores the versions of one trainer rank, one after the other, on a thread that starts with the first.

    A version that is not stored when the next one is placed is given up, and the log says so. Rank 0 creates the manifest, when the
    coordinator has every rank's part and has signed it.

    Args:
        objects: Writes the rank's objects.
        store: The store.
        rank: The rank's number.
        call: Calls the coordinator.
        seconds: Longest time from an object to the manifest; at most a third of :data:`~weightsync.store.catalog.GRACE_SECONDS`.
        keep: Versions that rank 0 leaves in the store; ``None``: all.
    """

    def __init__(
        self, objects: RankObjects, store: ObjectStore, rank: int, call: CoordinatorCall, seconds: float, keep: int | None
    ) -> None:
        self._objects, self._store, self._rank, self._call, self._seconds, self._keep = objects, store, rank, call, seconds, keep
        self._origin = Origin()
        self._jobs: queue.SimpleQueue[_VersionToStore | None] = queue.SimpleQueue()
        self._last_over = Latch()
        self._last_over.set()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.last: Version | None = None
        """The last version that this rank knows to be in the store."""

    def store(self, version: Version, step: int | None, published: PublishedBytes) -> None:
        """Store ``version`` in the background. Returns at once."""
        self._last_over = Latch()
        self._jobs.put(_VersionToStore(version, step, published, self._last_over))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-store", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to store. Returns False if that takes longer."""
        return self._last_over.wait(seconds)

    def close(self, seconds: float) -> None:
        """Wait for the last version for at most ``seconds``, then give it up. Safe twice."""
        if self._origin.elsewhere or self._closing:
            return
        if not self.wait(seconds):
            _log.warning("the last version was not stored within %g s: it is given up", seconds)
        self._closing = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._jobs.empty():
                    self._work(job)
                else:
                    self._failed(job.version, VersionError("the next version was published first"))
            finally:
                job.over.set()
            del job  # an idle thread must not keep the region mapped

    def _work(self, job: _VersionToStore) -> None:
        try:
            self._store_version(job.version, job.step, job.published)
            self.last = job.version
        except Exception as error:  # noqa: BLE001 - training goes on, whatever fails here
            self._failed(job.version, error)
            if not isinstance(error, WeightSyncError):
                _log.exception("storing version %s failed by an unexpected error", job.version)

    def _failed(self, version: Version, error: Exception) -> None:
        self._objects.confirm(version, None)
        _log.warning("version %s is not in the store: %s", version, error)

    def _store_version(self, version: Version, step: int | None, published: PublishedBytes) -> None:
        def check() -> None:
            if self._closing:
                raise Aborted("the trainer was closed")
            published.check()

        (epoch, number), what = version.order, f"storing version {version}"
        seconds = min(self._seconds, GRACE_SECONDS / 3)
        # Garbage collection may take an object that is older for what a dead trainer left.
        young = Deadline(GRACE_SECONDS - 2 * seconds)
        chain = self._objects.write(version, PublishedBytes(published.payload, published.changed, check))
        young.remaining(what)
        deadline = Deadline(seconds)
        answer = self._call(StorePart(epoch, number, chain, step), deadline.remaining(what))
        if isinstance(answer, SignedManifest):
            failpoints.reached("store.manifest")
            deadline.remaining(what)  # the same: this process may have been stopped for hours
            if not self._store.create(manifest_path(version.run, version.order), answer.data):
                raise VersionError(f"the store has another version {version}: a run needs an id that no other run in the store has")
            failpoints.reached("store.manifest_written")
            self._call(ManifestStored(epoch, number, self._store.url), deadline.remaining(what))
        elif not isinstance(answer, Done):
            raise ProtocolError(f"the coordinator answered the part of a stored version with {type(answer).__name__}")
        self._objects.confirm(version, chain)
        _log.info("version %s is in the store %s", version, self._store.url)
        if isinstance(answer, SignedManifest) and self._keep is not None:
            try:
                collect_garbage(self._store, version.run, answer.key, self._keep)
            except WeightSyncError as error:
                _log.warning("older versions than the newest %d were not removed: %s", self._keep, error)
