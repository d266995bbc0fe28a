"""What changed since the version that an engine rank serves: read and checked while it serves, applied in the pause, undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled
from weightsync.engine.readers import Readers
from weightsync.errors import ConfigurationError, ProtocolError, TransportUnavailable
from weightsync.model import Version
from weightsync.protocol.messages import ChangedWords, PlanSlice, Stage
from weightsync.spans import span
from weightsync.tensors.changes import Changes, blocks_of
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.shards import Shard
from weightsync.transports.base import Reader, Transport

UInt64 = npt.NDArray[np.uint64]

_KEPT = 2  # bytes of staging memory for each byte of lists: the lists, and the words that they replace


class DigestsNow(Protocol):
    """Fills memory, and digests it."""

    def digests(self) -> UInt64:
        """The digest of each row, of what is there now."""


class StagedChanges:
    """What leads the parameters of this rank from version ``base`` to version ``number``.

    It is for the memory of ``filler`` alone: a filler that takes its place, after parameters have moved, fills other memory.
    ``base_digests`` are those of every row of the plan's layout as this rank installed them. ``shards`` are where the words are
    written: they are kept alive until this is dropped. Not thread-safe, except :meth:`abort`.
    """

    def __init__(
        self, filler: DigestsNow, body: Stage, changes: Sequence[Changes], base_digests: UInt64, shards: Sequence[Shard]
    ) -> None:
        self._filler = filler
        self.base: Version = body.base
        self.number = body.number
        self.nbytes = sum(2 * each.words for each in changes)
        """Bytes of lists."""
        self._changes, self._base_digests, self.shards = changes, base_digests, shards
        self._stop = np.zeros(1, np.int8)

    def is_for(self, number: int, filler: object) -> bool:
        """Whether this leads to version ``number``, in the memory that ``filler`` fills."""
        return self.number == number and self._filler is filler

    def predict(self) -> UInt64:
        """The digests of every row as they will be. Raises :class:`~weightsync.errors.Aborted` after :meth:`abort`."""
        digests = self._base_digests.copy()
        for changes in self._changes:
            changes.predict(digests, self._stop)
        return digests

    def apply(self) -> Filled:
        """Replace the words that changed, and read them again. Raises :class:`~weightsync.errors.Aborted` after :meth:`abort`."""
        digests = self._base_digests.copy()
        with span("apply"):
            for changes in self._changes:
                changes.apply(digests, self._stop)
                failpoints.reached("engine.applied")
        return Filled(digests, "installed", 0.0)

    def revert(self) -> None:
        """Write the words of the base back, and read them again.

        Raises:
            ProtocolError: They are not what they were.
            Aborted: :meth:`abort` was called meanwhile.
        """
        self._stop[0] = 0
        digests = self._base_digests.copy()
        for changes in self._changes:
            changes.revert(digests, self._stop)
        if not (np.array_equal(digests, self._base_digests) and np.array_equal(self._filler.digests(), digests)):
            raise ProtocolError(f"the words of version {self.base} could not be put back")

    def abort(self) -> None:
        """Make what runs in another thread end soon. Never blocks."""
        self._stop[0] = 1


class ChangesReader:
    """Connections that read the changes of a plan's sources. ``tables`` are the plan's tiles, ``[source][group]``."""

    def __init__(self, context: FillContext, plan: PlanSlice, tables: Sequence[Sequence[CopyTable]]) -> None:
        self._context, self._plan, self._tables = context, plan, tables
        self._readers: Readers | None = None
        self._sources: list[tuple[Transport, Reader]] = []

    def read(
        self, filler: DigestsNow, body: Stage, base_digests: UInt64, shards: Sequence[Shard], deadline: Deadline
    ) -> StagedChanges:
        """Read the lists of every source, and check them.

        Raises:
            ConfigurationError: They take more memory than this rank has for staging.
            ProtocolError: They are not for this plan, or broken.
            TransportUnavailable: No transport reads them that serves each reader alone.
            WeightSyncError: What readers raise.
        """
        if len(body.sources) != len(self._plan.sources):
            raise ProtocolError(f"changes of {len(body.sources)} sources came for a plan of {len(self._plan.sources)}")
        try:
            readers = self._connected(deadline)
            changes = []
            room = self._context.bucket_bytes * self._context.buffers
            for index, words in enumerate(body.sources):
                each = self._ends(readers, index, words, body.number, deadline)
                room -= _KEPT * 2 * each.words
                if room < 0:
                    raise ConfigurationError(
                        "its changes take more than this engine rank's staging memory: give weightsync.Engine a larger bucket_bytes"
                    )
                self._lists(readers, index, words, each, body.number, deadline)
                changes.append(each)
        except BaseException:
            self.close()  # its connections may be beyond use
            raise
        return StagedChanges(filler, body, changes, base_digests, shards)

    def _connected(self, deadline: Deadline) -> Readers:
        if self._readers is None:
            self._readers = readers = self._context.readers
            for source in self._plan.sources:
                transport, reader = readers.open(source, None, deadline)
                if transport.traits.shared_fate:
                    raise TransportUnavailable(f"{transport.name} reads whole versions only")
                self._sources.append((transport, reader))
        return self._readers

    def _ends(self, readers: Readers, index: int, words: ChangedWords, number: int, deadline: Deadline) -> Changes:
        ends = np.zeros(blocks_of(words.nbytes), np.uint32)
        self._take(readers, index, number, _run(words.ends, ends), deadline)
        changes = Changes(self._tables[index], words.nbytes, ends)
        if len(ends) and int(ends[-1]) != words.words:
            raise ProtocolError(f"the source lists {int(ends[-1]):,} words of changes, and announced {words.words:,}")
        return changes

    def _lists(self, readers: Readers, index: int, words: ChangedWords, changes: Changes, number: int, deadline: Deadline) -> None:
        changes.allocate()
        self._take(readers, index, number, changes.table(words.payload), deadline)
        changes.check()

    def _take(self, readers: Readers, index: int, number: int, table: CopyTable, deadline: Deadline) -> None:
        transport, reader = self._sources[index]
        readers.prepare(reader, transport, self._plan.sources[index], [table], deadline)
        readers.read_alone(reader, number, deadline)

    def abort(self) -> None:
        """Make what runs in another thread end soon. Never blocks."""
        readers = self._readers
        if readers is not None:
            readers.abort()

    def close(self) -> None:
        """Close the connections; the next reading makes new ones. Safe twice."""
        readers, self._readers, self._sources = self._readers, None, []
        if readers is not None:
            readers.close()


def _run(offset: int, target: npt.NDArray[np.uint32]) -> CopyTable:
    if not len(target):
        return CopyTable.empty()
    columns = [np.array([value], np.int64) for value in (offset, 0, target.ctypes.data, 0, 1, target.nbytes)]
    return CopyTable(np.zeros(1, np.int32), *columns)
