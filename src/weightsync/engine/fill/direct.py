"""Direct delivery: readers write the engine's parameters, in host memory or on a CUDA device, and their digests are taken there.

What changed since the version that an engine rank serves: read and checked while it serves, applied in the pause, undone.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from weightsync import failpoints
from weightsync.arrays import UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled, PlanFiller
from weightsync.engine.readers import Readers
from weightsync.errors import ConfigurationError, ProtocolError, TransportUnavailable
from weightsync.model import Layout, Manifest, Version
from weightsync.protocol.messages import ChangedWords, PlanSlice, Stage
from weightsync.spans import span
from weightsync.tensors.changes import Changes, HostChanges, PlannedChanges, Sections, runs_table
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.changes import ChangeTables, DeviceChanges
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants, digest_rows
from weightsync.tensors.overlaps import overlapping
from weightsync.tensors.shards import Shard
from weightsync.transports.base import Reader, Transport

_log = logging.getLogger(__name__)
_GROUP_BYTES = 32 << 20  # an abort is noticed, and progress is reported, after each group
_KEPT = 2  # bytes of staging memory for each byte of lists: the lists, and the words that they replace
_COUNTED = 22  # bytes of staging memory for each block
_MOST_SHARDS = 1 << 21


class DirectFiller(PlanFiller):
    """Fills the engine's own parameters, and can stage what changes in them."""

    changes: ChangesReader | None = None
    """Reads what changed, instead of everything; ``None`` where parameters share bytes."""

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        super().prepare(deadline)
        self._stream = None if self.device is None else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if overlapping(self._context.manifest, self.layout, self._addresses) is None:
            self.changes = ChangesReader(self._context, self.plan, self._tables, len(self.layout), self.device)
            self._owned.callback(self.changes.close)

    def beside(self) -> AbstractContextManager[object]:
        """On a GPU, what runs in the block does not wait for the engine's own work, nor the other way round."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def let_go(self) -> None:
        """Keep only what :meth:`digests` needs. Comes after :meth:`close`."""
        self._tables, self.changes = [], None

    @abstractmethod
    def digests(self, deadline: Deadline, constants: DigestConstants = PUBLIC) -> UInt64:
        """The digest of each row of the layout, of what is in the parameters now, ``uint64[rows]``, with ``constants``."""

    def abort(self) -> None:
        """See :meth:`Filler.abort`."""
        super().abort()
        if self.changes is not None:
            self.changes.abort()


class StagedChanges:
    """What leads the parameters of this rank from version ``base`` to version ``number``.

    It is for the memory of ``filler`` alone: a filler that takes its place, after parameters have moved, fills other memory.
    ``base_digests`` are those of every row of the plan's layout as this rank installed them. ``shards`` are where the words are
    written: they are kept alive until this is dropped. Not thread-safe, except :meth:`abort`.
    """

    def __init__(
        self, filler: DirectFiller, body: Stage, changes: Sequence[Changes], base_digests: UInt64, shards: Sequence[Shard]
    ) -> None:
        self._filler = filler
        self.base: Version = body.base
        self.number = body.number
        self.nbytes = sum(4 * each.units for each in changes)
        """Bytes of lists."""
        self._changes, self._base_digests, self.shards = changes, base_digests, shards
        self._stop = np.zeros(1, np.int8)

    def is_for(self, number: int, filler: object) -> bool:
        """Whether this leads to version ``number``, in the memory that ``filler`` fills."""
        return self.number == number and self._filler is filler

    def predict(self, deadline: Deadline) -> UInt64:
        """Check the lists. Return the digests of every row as they will be.

        Raises:
            ProtocolError: They are no lists.
            Aborted: :meth:`abort` was called during it.
        """
        digests = self._base_digests.copy()
        for changes in self._changes:
            changes.predict(digests, self._stop, deadline)
        return digests

    def apply(self, deadline: Deadline) -> Filled:
        """Replace the words that changed, and read them again. Raises :class:`~weightsync.errors.Aborted` after :meth:`abort`."""
        digests = self._base_digests.copy()
        with span("apply"):
            for changes in self._changes:
                changes.apply(digests, self._stop, deadline)
                failpoints.reached("engine.applied")
        return Filled(digests, "installed", 0.0)

    def revert(self, deadline: Deadline) -> None:
        """Write the words of the base back, and read them again.

        Raises:
            ProtocolError: They are not what they were.
            Aborted: :meth:`abort` was called during it.
        """
        self._stop[0] = 0
        digests = self._base_digests.copy()
        for changes in self._changes:
            changes.revert(digests, self._stop, deadline)
        if not (np.array_equal(digests, self._base_digests) and np.array_equal(self._filler.digests(deadline), digests)):
            raise ProtocolError(f"the words of version {self.base} could not be put back")

    def abort(self) -> None:
        """Make what runs in another thread end soon. Never blocks."""
        self._stop[0] = 1


@dataclass(eq=False)
class ChangesReader:
    """Connections that read the changes of a plan's sources, to ``device`` (``None``: host memory).

    ``tables`` are the plan's tiles, ``[source][group]``, which fill ``rows``.
    """

    _context: FillContext
    _plan: PlanSlice
    _tables: Sequence[Sequence[CopyTable]]
    _rows: int
    _device: torch.device | None
    _readers: Readers | None = None
    _sources: list[tuple[Transport, Reader]] = field(default_factory=list)
    _planned: dict[int, tuple[PlannedChanges, ChangeTables | None]] = field(default_factory=dict)

    def read(
        self, filler: DirectFiller, body: Stage, base_digests: UInt64, shards: Sequence[Shard], deadline: Deadline
    ) -> StagedChanges:
        """Read the lists of every source.

        Raises:
            ConfigurationError: They take more memory than this rank has for staging.
            ProtocolError: They are not for this plan.
            TransportUnavailable: No transport reads them that serves each reader alone.
            WeightSyncError: What readers raise.
        """
        if len(body.sources) != len(self._plan.sources):
            raise ProtocolError(f"changes of {len(body.sources)} sources came for a plan of {len(self._plan.sources)}")
        with OnFailure(self.close):  # its connections may be beyond use
            readers = self._connected(deadline)
            changes = []
            room = self._context.room_for_changes(self._device)
            for index, words in enumerate(body.sources):
                planned, tables = self._planned_for(readers, index, words, body.number, deadline)
                room -= _COUNTED * planned.sections.blocks
                if room >= 0:
                    each = HostChanges(planned) if tables is None else DeviceChanges(planned, tables)
                    self._take(readers, index, body.number, each.counts_table(words.counts, words.region), deadline)
                    each.place(words.units, deadline)
                    room -= _KEPT * 4 * each.units
                if room < 0:
                    raise ConfigurationError(
                        "its changes take more than this engine rank's staging memory: give weightsync.Engine a larger bucket_bytes"
                    )
                each.allocate()
                self._take(readers, index, body.number, each.lists_table(words.payload, words.region), deadline)
                changes.append(each)
        return StagedChanges(filler, body, changes, base_digests, shards)

    def _connected(self, deadline: Deadline) -> Readers:
        if self._readers is None:
            self._readers = readers = self._context.readers
            for source in self._plan.sources:
                transport, reader = readers.open(source, self._device, deadline)
                if transport.traits.shared_fate:
                    raise TransportUnavailable(f"{transport.name} reads whole versions only")
                self._sources.append((transport, reader))
        return self._readers

    def _planned_for(
        self, readers: Readers, index: int, words: ChangedWords, number: int, deadline: Deadline
    ) -> tuple[PlannedChanges, ChangeTables | None]:
        """What the source's sections mean for this plan: the same for every version."""
        if index not in self._planned:
            if words.shards > _MOST_SHARDS:
                raise ProtocolError(f"the source lists changes of {words.shards:,} shards")
            content = torch.empty(32 * words.shards, dtype=torch.uint8, device=self._device or "cpu")
            self._take(
                readers, index, number, runs_table(words.region, [words.sections], [content.data_ptr()], [len(content)]), deadline
            )
            planned = PlannedChanges(self._tables[index], Sections.from_bytes(content.cpu().numpy().tobytes()))
            tables = None if self._device is None else ChangeTables(planned, self._rows, self._device)
            if tables is not None:
                DeviceChanges(planned, tables).warm(deadline)
            self._planned[index] = planned, tables
        return self._planned[index]

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
        readers, self._readers, self._sources, self._planned = self._readers, None, [], {}
        if readers is not None:
            readers.close()


class HostDirect(DirectFiller):
    """Writes the engine's parameters, in host memory at ``addresses``, group by group.

    Parameters that share bytes are digested after all are written, because the last one written decides what both hold.
    """

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout, addresses: tuple[int, ...]) -> None:
        super().__init__(context, plan, layout, row_groups(context.manifest, layout), None, addresses)
        shared = overlapping(context.manifest, layout, addresses)
        self._digests_last = shared is not None
        if shared is not None:
            _log.warning(
                "the engine's %s and %s share memory: a version in which they differ there cannot be installed. Untie them at the "
                "engine, or tie them at the trainer too", *shared,
            )  # fmt: skip

    def digests(self, deadline: Deadline, constants: DigestConstants = PUBLIC) -> UInt64:
        """See :meth:`DirectFiller.digests`."""
        digests = np.zeros(len(self.layout), np.uint64)
        for group in self._groups:
            self._context.engine.check_abort()
            digest_rows(self._context.manifest, self.layout, self._addresses, *group, digests, constants)
        return digests

    def run(self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC) -> Filled:
        """See :meth:`PlanFiller.run`."""
        self._readers.begin(version, deadline)
        digests = np.zeros(len(self.layout), np.uint64)
        seconds, done = 0.0, 0
        for group, nbytes in enumerate(self._group_bytes):
            started = time.perf_counter()
            self._read_host(group, digests, deadline, constants)
            seconds += time.perf_counter() - started
            done += nbytes
            self._report(done)
        if self._digests_last:
            with span("digest"):
                digests = self.digests(deadline, constants)
        self._readers.end(deadline)
        return Filled(digests, "installed", seconds)


def row_groups(manifest: Manifest, layout: Layout, group_bytes: int = _GROUP_BYTES) -> list[tuple[int, int]]:
    """Ranges of consecutive rows of about ``group_bytes`` each (a larger row is a group of its own)."""
    sizes = layout.sizes() * manifest.itemsizes[layout.tensor]
    if not len(sizes):
        return []
    group = (np.cumsum(sizes) - 1) // group_bytes
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


class DeviceDirect(DirectFiller):
    """Writes the engine's parameters, on ``device`` at ``addresses``, all at once.

    All readers are in flight together, except those that may wait for other engine ranks: they are begun, read and ended one after
    the other, because a GPU must not wait for two senders of which each waits for another reader. Each rank of a replica begins
    with another one of these, so that the ranks do not all ask the same trainer rank at once. Where readers work on the device's
    stream, the digests are queued before the bytes are in place: the device does not wait for the host in between.
    """

    device: torch.device

    def __init__(
        self, context: FillContext, plan: PlanSlice, layout: Layout, addresses: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(context, plan, layout, [(0, len(layout))], device, addresses)
        self._digest = DeviceDigest(context.manifest, layout, device)

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        super().prepare(deadline)
        in_turn = self._readers.sharing_fate
        first = self._context.rank % max(len(in_turn), 1)
        self._in_turn = in_turn[first:] + in_turn[:first]
        self._together = [reader for reader in self._readers if reader not in in_turn]
        self._digest.build(self._addresses)
        self._stopwatch.lap("tables")

    def digests(self, deadline: Deadline, constants: DigestConstants = PUBLIC) -> UInt64:
        """See :meth:`DirectFiller.digests`. In the current stream."""
        with torch.cuda.device(self.device):
            self._digest.build(self._addresses)
            self._digest.launch(0, len(self.layout), constants)
            wait_for_device(self.device, deadline, f"digesting parameters on {self.device}")
            return self._digest.taken()

    def let_go(self) -> None:
        """See :meth:`DirectFiller.let_go`. Readers that are closed still have tables on the device."""
        super().let_go()
        self._together, self._in_turn = [], []

    def run(self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC) -> Filled:
        """See :meth:`PlanFiller.run`. Complete on the device when it returns."""
        for reader in self._together:
            reader.begin(version, deadline)
        started = time.perf_counter()
        self._context.engine.check_abort()
        with torch.cuda.device(self.device):
            reads = [(reader, reader.submit(0, deadline)) for reader in self._together]
            for reader in self._in_turn:
                self._readers.read_alone(reader, version, deadline)
            for reader, completion in reads:
                if not reader.stream_ordered:
                    self._readers.finish(reader, 0, completion, deadline)
            self._digest.build(self._addresses)
            self._digest.launch(0, len(self.layout), constants)
            self._context.check_memory()  # while the device copies
            for reader, completion in reads:
                if reader.stream_ordered:
                    self._readers.finish(reader, 0, completion, deadline)
            received = time.perf_counter()
            with span("digest"):
                digests = self._digest.taken()
        finished = time.perf_counter()
        for reader in self._together:
            reader.end(deadline)
        return Filled(digests, "installed", received - started, digest_seconds=finished - received)
