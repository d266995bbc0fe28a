"""A trainer rank's shards in memory, brought from one stored version to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np

from weightsync.arrays import Bytes
from weightsync.daemon_threads import DaemonThreads
from weightsync.deadline import Deadline
from weightsync.model.stored import CHUNK_BYTES, StoredObject
from weightsync.store.containers import blocks_of
from weightsync.store.objects import ObjectStore
from weightsync.store.region import CHUNKS_AHEAD, READING_THREADS, DeltaObject, verified_chunk


class KeptRegion:
    """A trainer rank's shards in this process's memory, brought from one stored version to the next. Not thread-safe.

    Only objects that the memory lacks are read, and each is verified before a byte of a delta is applied: what fails leaves the
    version before, unless a key frame was being read.

    Args:
        store: The store.
        nbytes: Bytes of the region.
    """

    def __init__(self, store: ObjectStore, nbytes: int) -> None:
        self._store = store
        self.memory = np.empty(nbytes, np.uint8)
        """The region, ``uint8[nbytes]``."""
        self.chain: tuple[StoredObject, ...] = ()
        """What the memory holds; empty while it holds no version, or after it was set to that: then the next one is read whole."""

    def update(self, chain: tuple[StoredObject, ...], deadline: Deadline) -> None:
        """Have the version with this ``chain`` in memory.

        Raises:
            ProtocolError: A delta is none.
            VerificationError: An object is not what was stored.
            StaleSource: An object was removed.
            TransportError: The store fails.
            DeadlineExceeded: ``deadline`` passed.
        """
        there = len(self.chain) if chain[: len(self.chain)] == self.chain else 0
        for index, item in enumerate(chain[there:], there):
            if item.kind == "key":
                self.chain = ()
                for chunk, data in self._chunks(item, deadline):
                    first = chunk * CHUNK_BYTES - item.data
                    shards = data[max(-first, 0) :]
                    self.memory[max(first, 0) :][: len(shards)] = shards
            else:
                delta = DeltaObject(self._store, item, len(self.memory))
                image = delta.image()
                for chunk, data in self._chunks(item, deadline):
                    image.put(chunk, data)
                self.chain = ()
                delta.fold(image, self.memory.ctypes.data, 0, blocks_of(len(self.memory)))
            self.chain = chain[: index + 1]

    def _chunks(self, item: StoredObject, deadline: Deadline) -> Iterator[tuple[int, Bytes]]:
        """Read an object's chunks, some ahead. No thread has the memory, so one that outlives a failure changes nothing in it."""
        threads = DaemonThreads(READING_THREADS, "weightsync-store")
        try:
            running = deque[Future[Bytes]]()
            for chunk in range(item.chunks + CHUNKS_AHEAD):
                if chunk < item.chunks:
                    running.append(threads.submit(partial(verified_chunk, self._store, item, chunk)))
                if chunk >= CHUNKS_AHEAD:
                    yield chunk - CHUNKS_AHEAD, deadline.result(running.popleft(), f"reading {item.path}")
        finally:
            threads.close()
