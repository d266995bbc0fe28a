"""A trainer rank's shards as a version in a store has them: key frame and deltas, folded in one pass over what is needed."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from weightsync.arrays import Bytes, Int8, UInt64
from weightsync.daemon_threads import DaemonThreads
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ProtocolError, VerificationError
from weightsync.model.stored import CHUNK_BYTES, StoredObject
from weightsync.old_names import moved_names
from weightsync.store.containers import blocks_of, lists_offset
from weightsync.store.fold_kernel import fold_changes
from weightsync.store.objects import ObjectStore
from weightsync.tensors.change_kernels import CHANGE_BLOCK
from weightsync.tensors.copies import check_tiles, copy_and_digest
from weightsync.tensors.copy_table import CopyTable

READING_THREADS = 4
CHUNKS_AHEAD = 8
"""Chunks that are fetched while the ones before are copied."""
_BATCH_BYTES = 4 * CHUNK_BYTES  # of the region, from which tiles are copied together
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


def verified_chunk(store: ObjectStore, item: StoredObject, chunk: int) -> Bytes:
    """Read one chunk of an object.

    Raises:
        VerificationError: It is not what was stored.
        StaleSource: The object was removed.
        TransportError: The store fails.
    """
    begin = chunk * CHUNK_BYTES
    end = min(begin + CHUNK_BYTES, item.nbytes)
    data = store.read(item.path, begin, end)
    digest = hashlib.sha256(data).digest()
    if len(data) != end - begin or digest != item.hashes[chunk * len(digest) :][: len(digest)]:
        raise VerificationError(f"{item.path} in the store {store.url} is not what was stored: it was changed")
    return np.frombuffer(data, np.uint8)


class ObjectImage:
    """An object's bytes at their place in reserved address space. Chunks take memory from :meth:`fetch` to :meth:`drop`."""

    def __init__(self, store: ObjectStore, item: StoredObject) -> None:
        self._store, self._item = store, item
        self._memory = mmap.mmap(-1, max(item.nbytes, 1), _PRIVATE)
        with suppress(AttributeError, OSError):  # not on Linux, or not in this kernel: then there are more page faults
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._there = np.zeros(item.chunks, bool)
        self._dropped = 0
        self._lock = threading.Lock()
        self.address = int(self._bytes.ctypes.data) + item.data
        """Where the data begins."""
        self.nbytes = item.nbytes - item.data
        """Bytes of the data."""

    def data(self, first: int, last: int) -> Bytes:
        """Return bytes of the data."""
        return self._bytes[self._item.data + first : self._item.data + last]

    def fetch(self, first: int, last: int) -> None:
        """Have bytes ``first <= i < last`` of the data in memory, verified. Thread-safe.

        Raises:
            VerificationError: A chunk is not what was stored.
            StaleSource: The object was removed.
            TransportError: The store fails.
        """
        if last <= first:
            return
        for chunk in range((self._item.data + first) // CHUNK_BYTES, (self._item.data + last - 1) // CHUNK_BYTES + 1):
            if not self._there[chunk]:
                with self._lock:
                    if not self._there[chunk]:
                        self.fetch_chunk(chunk)

    def fetch_chunk(self, chunk: int) -> None:
        """Have one chunk of the object in memory, verified. Two threads may fetch different chunks."""
        self.put(chunk, verified_chunk(self._store, self._item, chunk))

    def put(self, chunk: int, data: Bytes) -> None:
        """Have a verified chunk in memory."""
        begin = chunk * CHUNK_BYTES
        self._bytes[begin : begin + len(data)] = data
        self._there[chunk] = True

    def drop(self, last: int) -> None:
        """Free the chunks before byte ``last`` of the data, which no thread needs now. They can be fetched again."""
        chunks = max((self._item.data + last) // CHUNK_BYTES, 0)
        first, end = self._dropped * CHUNK_BYTES, min(chunks * CHUNK_BYTES, self._item.nbytes)
        if end > first:
            self._there[self._dropped : chunks] = False
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)
            self._dropped = chunks


class DeltaObject:
    """What changed from one object of a chain to the next: where the lists are."""

    def __init__(self, store: ObjectStore, item: StoredObject, nbytes: int) -> None:
        self._store, self._item = store, item
        self._nbytes, blocks = nbytes, blocks_of(nbytes)
        self._lists = lists_offset(blocks)
        image = self.image()
        if image.nbytes < self._lists:
            raise ProtocolError(f"{item.path} is too short for the region that it changes")
        image.fetch(0, 4 * blocks)
        self._ends = image.data(0, 4 * blocks).view("<u4").astype(np.uint32)
        words = int(self._ends[-1]) if blocks else 0
        if np.any(self._ends[1:] < self._ends[:-1]) or self._lists + 2 * words != image.nbytes:
            raise ProtocolError(f"{item.path} lists more or fewer changes than it holds")

    def image(self) -> ObjectImage:
        """Return an image of the object, in which nothing is yet."""
        return ObjectImage(self._store, self._item)

    def _list(self, block: int) -> int:
        return self._lists + 2 * (int(self._ends[block - 1]) if block else 0)

    def fold(self, image: ObjectImage, region: int, first: int, last: int) -> None:
        """Apply the changes of the blocks ``first <= i < last`` to the region at this address."""
        image.fetch(self._list(first), self._list(last))
        wrong = fold_changes(region, self._nbytes, self._ends.ctypes.data, image.address + self._lists, first, last)
        if wrong >= 0:
            raise ProtocolError(f"the changes of block {wrong} in {self._item.path} are not in order, or outside of it")

    def drop(self, image: ObjectImage, block: int) -> None:
        """Free what only earlier blocks need."""
        image.drop(self._list(block))


class _Pass:
    """One pass over the region: chunks of the key frame come into memory, changes are applied to them, and they go."""

    def __init__(self, key: ObjectImage, first: int, nbytes: int, deltas: Sequence[DeltaObject], stop: Int8) -> None:
        self.key, self._first, self._nbytes, self._stop = key, first, nbytes, stop
        self._deltas = [(delta, delta.image()) for delta in deltas]

    def fold(self, chunk: int) -> None:
        """Have the region's part of a chunk as the version has it. Each chunk is folded by one thread."""
        if self._stop[0]:
            raise Aborted("reading from the store was aborted")
        self.key.fetch_chunk(chunk)
        last = min((chunk + 1) * CHUNK_BYTES - self._first, self._nbytes)
        if last > 0:
            for delta, image in self._deltas:
                delta.fold(image, self.key.address, self._block(chunk), -(-last // CHANGE_BLOCK))

    def drop(self, chunk: int) -> None:
        """Free what only chunks before this one need, which are folded and copied, or never will be."""
        self.key.drop(chunk * CHUNK_BYTES - self._first)
        for delta, image in self._deltas:
            delta.drop(image, self._block(chunk))

    def _block(self, chunk: int) -> int:
        return max(chunk * CHUNK_BYTES - self._first, 0) // CHANGE_BLOCK


@dataclass(frozen=True, eq=False)
class _Batch:
    tiles: CopyTable
    chunks: list[int]
    """Of the key frame, from which the tiles read."""


class StoredRegion:
    """The region of one trainer rank in a version, read tile by tile. Chunks without a tile are not read.

    Not thread-safe, except :meth:`abort`.

    Args:
        store: The store.
        chain: A key frame, then deltas. Not trusted beyond their hashes.
        nbytes: Bytes of the region.

    Raises:
        ProtocolError: A delta is none.
        VerificationError: An object is not what was stored.
        StaleSource: An object was removed.
    """

    def __init__(self, store: ObjectStore, chain: Sequence[StoredObject], nbytes: int) -> None:
        self._store, self._key, self._nbytes = store, chain[0], nbytes
        self._deltas = [DeltaObject(store, item, nbytes) for item in chain[1:]]
        self._groups: list[list[_Batch]] = []
        self._stop = np.zeros(1, np.int8)
        self._aborted: Future[None] = Future()
        self._threads = DaemonThreads(READING_THREADS, "weightsync-store")

    def prepare(self, groups: Sequence[CopyTable]) -> None:
        """Say which tiles will be read, see :meth:`weightsync.transports.base.Reader.prepare`."""
        for tiles in groups:
            check_tiles(tiles, (self._nbytes,))
        self._groups = [list(self._batches(tiles)) for tiles in groups]

    def _batches(self, tiles: CopyTable) -> Iterator[_Batch]:
        """Yield the tiles in the order of the region, cut into batches."""
        if len(tiles):
            order = np.argsort(tiles.source, kind="stable")
            window = tiles.source[order] // _BATCH_BYTES
            for part in np.split(order, np.flatnonzero(np.diff(window)) + 1):
                batch = CopyTable.of_table(tiles.table[part])
                yield _Batch(batch, self._chunks_of(batch))

    def _chunks_of(self, tiles: CopyTable) -> list[int]:
        chunks: set[int] = set()
        columns = (tiles.source + self._key.data, tiles.source_stride, tiles.rows, tiles.row_bytes)
        for source, stride, rows, size in zip(*(column.tolist() for column in columns), strict=True):
            near = rows == 1 or stride <= CHUNK_BYTES  # no chunk lies between two rows
            for row in range(1 if near else rows):
                begin = source + row * stride
                end = begin + size + ((rows - 1) * stride if near else 0)
                chunks.update(range(begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1))
        return sorted(chunks)

    @property
    def groups(self) -> int:
        """How many groups are prepared."""
        return len(self._groups)

    def begin(self) -> None:
        """Clear an earlier abort."""
        self._stop[0] = 0
        self._aborted = Future()

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """Copy the tiles of a group to their targets, see :meth:`weightsync.transports.base.Reader.submit`."""
        batches = self._groups[group]
        image = ObjectImage(self._store, self._key)
        work = _Pass(image, self._key.data, self._nbytes, self._deltas, self._stop)
        order = iter(dict.fromkeys(chunk for batch in batches for chunk in batch.chunks))
        running: dict[int, Future[None]] = {}
        folded: set[int] = set()

        def start_more() -> None:
            while len(running) < CHUNKS_AHEAD and (chunk := next(order, None)) is not None:
                running[chunk] = self._threads.submit(partial(work.fold, chunk))

        try:
            for batch in batches:
                work.drop(batch.chunks[0])
                for chunk in batch.chunks:
                    if chunk not in folded:
                        start_more()
                        deadline.result(running[chunk], f"reading from the store {self._store.url}", self._aborted)
                        folded.add(chunk)
                        del running[chunk]
                start_more()
                copy_and_digest(batch.tiles, (image.address,), digests, self._stop)
                if self._stop[0]:
                    raise Aborted("reading from the store was aborted")
        finally:
            for future in running.values():
                future.cancel()

    def abort(self) -> None:
        """Make :meth:`read` in another thread raise :class:`~weightsync.errors.Aborted` soon. Never blocks."""
        self._stop[0] = 1
        with suppress(InvalidStateError):
            self._aborted.set_result(None)

    def close(self) -> None:
        """End the threads, which may still wait for the store. Safe twice."""
        self.abort()
        self._threads.close()


moved_names(__name__, "weightsync_relay.kept_region", "KeptRegion")
