r"""The words of a rank's shards that differ from those of an earlier version: how they are listed, found, checked and applied.

The memory of a shard is a *section*. It is cut into blocks of 8 KiB, and these into words of the size of the shard's dtype, at most
four bytes. Blocks are numbered through all sections. ``counts[block]`` (``uint16``) says how many words of the block changed, and
for each block there is a list. Lists begin and end at 4-byte units, and lie one after the other, all little-endian:

===========================  =========================================================================================
changed words of the block   its list
===========================  =========================================================================================
none                         empty
few                          the places of the words in the block (``uint16``), ascending; then their values, aligned to a word
so many that a list of them  the block itself
would be as long
===========================  =========================================================================================

So a changed word of bfloat16 takes four bytes, one of float32 six, and each block two more. The lists of a version in which
everything changed are the version itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightsync.arrays import Int8, Int64, UInt16, UInt32, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ProtocolError
from weightsync.model import Layout, Manifest
from weightsync.planning.geometry import spread
from weightsync.tensors.change_kernels import CHANGE_BLOCK, TILE_COLUMNS, apply_changes, find_changes, unite_changes
from weightsync.tensors.copies import CORES_EACH, in_threads
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable, joined_tables
from weightsync.tensors.digest import columns_address

_NEAR = 256  # blocks between two that are read rather than skipped
_MOST_REGIONS, _MOST_BYTES = 1 << 21, 1 << 42


def _list_units(counts: Int64, words: Int64 | int, sizes: Int64 | int) -> Int64:
    """4-byte units of the lists of blocks of ``sizes`` bytes, of which ``counts`` words (of ``words`` bytes) changed."""
    units: Int64 = ((2 * counts + words - 1) // words * words + counts * words + 3) // 4
    return np.where(counts == 0, 0, np.minimum(units, (sizes + np.int64(3)) // 4))


@dataclass(frozen=True, eq=False)
class Sections:
    """The shards of a rank, as regions of its memory: region, offset in it, bytes, and bytes of a word, ``int64[sections]`` each.

    Raises:
        ProtocolError: They are none: out of order, or of impossible sizes.
    """

    region: Int64
    offset: Int64
    nbytes: Int64
    word: Int64

    def __post_init__(self) -> None:
        columns = (self.region, self.offset, self.nbytes, self.word)
        if len({len(column) for column in columns}) > 1 or any(np.any(column < 0) for column in columns):
            raise ProtocolError("the source described its shards in columns that do not fit")
        if np.any((self.nbytes < 1) | (self.offset >= _MOST_BYTES) | (self.nbytes >= _MOST_BYTES) | (self.region >= _MOST_REGIONS)):
            raise ProtocolError("the source described shards of an impossible size")
        if np.any((self.word < 1) | (self.word > 4) | (self.word == 3)) or np.any(np.diff(self._keys) <= 0):
            raise ProtocolError("the source described shards that are not in order, or of words that do not exist")

    @cached_property
    def _keys(self) -> Int64:
        return self.region * _MOST_BYTES + self.offset

    @classmethod
    def of(cls, manifest: Manifest, layout: Layout) -> Sections:
        """Those of a ``layout`` whose rows are shards."""
        used = layout.ends(manifest) - layout.offset
        order = np.lexsort((layout.offset, layout.region))
        order = order[np.all(layout.stops > layout.starts, axis=1)[order]]
        word = np.minimum(manifest.itemsizes[layout.tensor], 4)
        return cls(*(column[order].astype(np.int64) for column in (layout.region, layout.offset, used, word)))

    @classmethod
    def from_bytes(cls, content: bytes) -> Sections:
        """Inverse of :meth:`to_bytes`."""
        if len(content) % 32:
            raise ProtocolError("the source described its shards in columns that do not fit")
        region, offset, nbytes, word = np.frombuffer(content, "<i8").astype(np.int64).reshape(4, -1)
        return cls(region, offset, nbytes, word)

    def to_bytes(self) -> bytes:
        """The columns, one after the other, little-endian."""
        return np.stack([self.region, self.offset, self.nbytes, self.word]).astype("<i8").tobytes()

    def __len__(self) -> int:
        return len(self.region)

    @cached_property
    def first(self) -> Int64:
        """The first block of each section, and the number of all blocks: ``int64[sections + 1]``."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(-(-self.nbytes // CHANGE_BLOCK))])

    @property
    def blocks(self) -> int:
        """Number of all blocks."""
        return int(self.first[-1])

    @cached_property
    def block_words(self) -> Int64:
        """Bytes of a word of each block."""
        return np.repeat(self.word, np.diff(self.first))

    @cached_property
    def block_bytes(self) -> Int64:
        """Bytes of each block."""
        sizes = np.full(self.blocks, CHANGE_BLOCK, np.int64)
        last = self.first[1:] - 1
        sizes[last] = self.nbytes - (self.nbytes - 1) // CHANGE_BLOCK * CHANGE_BLOCK
        return sizes

    def list_ends(self, counts: UInt16) -> Int64:
        """Zero, and the 4-byte unit where each block's list ends, ``int64[blocks + 1]``."""
        units = _list_units(counts.astype(np.int64), self.block_words, self.block_bytes)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(units)])

    def containing(self, region: Int64, offset: Int64) -> Int64:
        """The section that begins at or last before each place; -1 where none does."""
        return np.searchsorted(self._keys, region * _MOST_BYTES + offset, side="right").astype(np.int64) - 1

    def table(self, before: Int64, now: Int64) -> Int64:
        """What :func:`find` reads, for sections at these addresses."""
        return np.ascontiguousarray(np.stack([before, now, self.nbytes, self.word], axis=1))


def find(
    table: Int64,
    counts: UInt16,
    payload: UInt32,
    changed: Int64,
    stop: Int8,
) -> int | None:
    """List which words of all sections of a ``table`` differ from those before, and make those equal to them.

    Args:
        table: See :meth:`Sections.table`.
        counts: Takes the changed words of each block.
        payload: Takes the lists.
        changed: Takes the changed words of each section.
        stop: Another thread may set ``stop[0]``.

    Returns:
        Units of ``payload`` that are used; ``None`` if it has no room for the lists. The words before are then equal in part.

    Raises:
        Aborted: ``stop[0]`` was set. What the words before are is then not known.
    """
    used = find_changes(
        table.ctypes.data, len(table), counts.ctypes.data, payload.ctypes.data, len(payload), changed.ctypes.data, stop.ctypes.data
    )
    return _units_used(used)


def _units_used(used: int) -> int | None:
    """The units that a kernel says it used; ``None`` if there was no room."""
    if used == -2:
        raise Aborted("looking for the changes of this version was stopped")
    return used if used >= 0 else None


@dataclass(frozen=True, eq=False)
class Step:
    """What changed from one version to the next: counts and lists, as :func:`find` made them."""

    counts: UInt16
    payload: UInt32

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.counts.nbytes + self.payload.nbytes


def unite(
    sections: Sections,
    now: Int64,
    steps: Sequence[Step],
    counts: UInt16,
    payload: UInt32,
    stop: Int8,
) -> int | None:
    """List the words that changed in any of ``steps``, with the values that they have ``now``. Otherwise as :func:`find`."""
    firsts = [sections.list_ends(step.counts)[:-1] for step in steps]
    columns = [
        (step.counts.ctypes.data, first.ctypes.data, step.payload.ctypes.data) for step, first in zip(steps, firsts, strict=True)
    ]
    table, chain = sections.table(now, now), np.array(columns, np.int64)
    used = unite_changes(
        table.ctypes.data, len(table), chain.ctypes.data, len(chain), counts.ctypes.data, payload.ctypes.data, len(payload),
        stop.ctypes.data,
    )  # fmt: skip
    return _units_used(used)


def change_tiles(tables: Sequence[CopyTable], sections: Sections) -> Int64:
    """The tiles of ``tables``, which have keys, as kernels read them: ``int64[tiles, 15]``.

    Columns: 0 first byte in the section, 1 source stride, 2 target, 3 target stride, 4 rows, 5 bytes of a row, 6 row of the
    target's layout, 7 to 11 the other keys, 12 first block of the section, 13 its bytes, 14 bytes of a word.

    Raises:
        ProtocolError: A tile reads what is in no section, or part of a word.
    """
    whole = joined_tables(tables)
    tiles = np.empty((len(whole), TILE_COLUMNS), np.int64)
    section = sections.containing(whole[:, 0], whole[:, 1])
    if np.any(section < 0) or np.any(sections.region[section] != whole[:, 0]):
        raise ProtocolError("the plan reads what the source does not list changes of")
    single = whole[:, 5] == 1
    tiles[:, 0] = whole[:, 1] - sections.offset[section]
    tiles[:, 1] = np.where(single, 0, whole[:, 2])
    tiles[:, 2:6] = whole[:, 3:7]
    tiles[:, 6:12] = whole[:, 7:]
    tiles[:, 12], tiles[:, 13], tiles[:, 14] = sections.first[section], sections.nbytes[section], sections.word[section]
    parts = tiles[:, 0] | tiles[:, 1] | tiles[:, 5] | tiles[:, 9] | np.where(single, 0, tiles[:, 10])
    if np.any(ends_of(tiles) > tiles[:, 13]) or np.any(parts % tiles[:, 14]) or np.any((tiles[:, 1] <= 0) & ~single):
        raise ProtocolError("the plan reads beyond the shards whose changes are listed, or parts of their words")
    return tiles


def ends_of(tiles: Int64) -> Int64:
    """The end in its section of what each tile reads."""
    ends: Int64 = tiles[:, 0] + (tiles[:, 4] - 1) * tiles[:, 1] + tiles[:, 5]
    return ends


class PlannedChanges:
    """Which lists of one source a rank reads, and where their words go. Made once for a plan.

    Args:
        tables: The tiles that read from this source, with keys.
        sections: What the source lists changes of. Not trusted.

    Raises:
        ProtocolError: The two do not fit.
    """

    def __init__(self, tables: Sequence[CopyTable], sections: Sections) -> None:
        self.sections = sections
        self.tiles = change_tiles(tables, sections)
        first = self.tiles[:, 12] + self.tiles[:, 0] // CHANGE_BLOCK
        last = self.tiles[:, 12] + (ends_of(self.tiles) - 1) // CHANGE_BLOCK + 1
        order = np.argsort(first, kind="stable")
        first, reach = first[order], np.maximum.accumulate(last[order])
        begins = np.concatenate([np.ones(min(len(first), 1), bool), first[1:] > reach[:-1] + _NEAR])
        self.starts: Int64 = first[begins]
        """The first block of each run of blocks whose lists are read together."""
        self.stops: Int64 = reach[np.concatenate([begins[1:], np.ones(min(len(first), 1), bool)])]
        """The end of each run."""


class Changes(ABC):
    """What changed in one source of a plan: first the counts of all blocks are read, then the lists."""

    def __init__(self, planned: PlannedChanges, counts_address: int) -> None:
        self._planned, self._counts_address = planned, counts_address
        self.units = 0
        """4-byte units of lists that this rank reads."""
        self._offsets: Int64 = np.zeros(1, np.int64)
        self._firsts: Int64 = np.zeros(0, np.int64)

    def counts_table(self, offset: int, region: int) -> CopyTable:
        """What is to be read where the counts begin at byte ``offset`` of the source's ``region``."""
        return runs_table(region, [offset], [self._counts_address], [2 * self._planned.sections.blocks])

    def place(self, total: int, deadline: Deadline) -> None:
        """Decide what is read of lists of ``total`` units, once the counts are here.

        Raises:
            ProtocolError: They are no counts of these lists.
        """
        firsts, stops, used = self._edges(deadline)
        if used != total:
            raise ProtocolError(f"the source lists {used:,} units of changes, and announced {total:,}")
        self._firsts = firsts
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - firsts)])
        self.units = int(self._offsets[-1])

    def lists_table(self, offset: int, region: int) -> CopyTable:
        """What is to be read where the lists begin at byte ``offset`` of the source's ``region``. After :meth:`allocate`."""
        sizes = 4 * np.diff(self._offsets)
        return runs_table(region, offset + 4 * self._firsts, self._address + 4 * self._offsets[:-1], sizes)

    @property
    @abstractmethod
    def _address(self) -> int: ...

    @abstractmethod
    def _edges(self, deadline: Deadline) -> tuple[Int64, Int64, int]:
        """The first and the last unit of each run's lists, and all units. Raises ProtocolError for impossible counts."""

    @abstractmethod
    def allocate(self) -> None:
        """Take memory for the lists, and for the words that they replace: eight bytes for each of :attr:`units`."""

    def predict(self, digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """Check the lists, and add to ``digests`` (``uint64[rows]``) what they would add to them.

        Raises:
            ProtocolError: They are none.
            Aborted: ``stop[0]`` was set, as by the other methods.
        """
        self._run((0,), digests, stop, deadline)

    def apply(self, digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """Replace the words in the tiles' targets, keep what they were, read them again, and add the difference to ``digests``."""
        self._run((1, 3), digests, stop, deadline)

    def revert(self, digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """Write back what was kept, read it again, and add to ``digests`` the difference from it: nothing, if all is well."""
        self._run((2, 3), digests, stop, deadline)

    @abstractmethod
    def _run(self, steps: tuple[int, ...], digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """Take steps of the kernels, one after the other: 0 predicts, 1 applies, 2 reverts, and 3 reads again."""


class HostChanges(Changes):
    """Changes that are staged in host memory, of targets there."""

    def __init__(self, planned: PlannedChanges) -> None:
        self.counts = np.zeros(planned.sections.blocks, np.uint16)
        super().__init__(planned, self.counts.ctypes.data)
        self._checked = False  # whether step 0 has accepted the lists: the others write where these say

    def _edges(self, deadline: Deadline) -> tuple[Int64, Int64, int]:
        sections, counts = self._planned.sections, self.counts.astype(np.int64)
        if np.any(counts * sections.block_words > sections.block_bytes):
            raise ProtocolError("the source lists more changes than there are words")
        self._ends = ends = sections.list_ends(self.counts)
        return ends[self._planned.starts], ends[self._planned.stops], int(ends[-1])

    @property
    def _address(self) -> int:
        return int(self._payload.ctypes.data)

    def allocate(self) -> None:
        """See :meth:`Changes.allocate`."""
        self._payload = np.zeros(max(self.units, 1), np.uint32)
        self._kept = np.zeros(max(self.units, 1), np.uint32)
        self._at = self._ends
        for start, stop, first, offset in zip(self._planned.starts, self._planned.stops, self._firsts, self._offsets, strict=False):
            self._at[start:stop] += offset - first

    def _run(self, steps: tuple[int, ...], digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        tiles = self._planned.tiles
        if steps != (0,) and not self._checked:
            raise ProtocolError("changes were to be applied that had not been checked, or were refused")

        def run(first: int, last: int, out: UInt64) -> int:
            return apply_changes(
                tiles.ctypes.data, first, last, self.counts.ctypes.data, self._at.ctypes.data, self._payload.ctypes.data,
                self._kept.ctypes.data, steps[0], steps[-1], out.ctypes.data, columns_address, stop.ctypes.data,
            )  # fmt: skip

        # In the pause nothing else runs here, and each core waits for memory. Step 0 is taken while the engine serves.
        finished = in_threads(run, tiles[:, 4] * tiles[:, 5], digests, cores_each=CORES_EACH if steps == (0,) else 1)
        if min(finished) < 0:
            raise ProtocolError(f"the changes of block {-1 - min(finished)} of the source are not in order, or outside of it")
        if sum(finished) < len(tiles):
            raise Aborted("the changes of this version were not all applied: the update was aborted")
        self._checked = True


def runs_table(
    region: int, sources: Sequence[int] | Int64, targets: Sequence[int] | Int64, sizes: Sequence[int] | Int64
) -> CopyTable:
    """Contiguous copies, cut into tiles."""
    source, target, size = (np.asarray(column, np.int64) for column in (sources, targets, sizes))
    run, part = spread(-(-size // TILE_BYTES))
    part *= TILE_BYTES
    ones = np.ones(len(run), np.int64)
    return CopyTable(
        region=np.full(len(run), region, np.int32),
        source=source[run] + part,
        source_stride=0 * ones,
        target=target[run] + part,
        target_stride=0 * ones,
        rows=ones,
        row_bytes=np.minimum(size[run] - part, TILE_BYTES),
    )
