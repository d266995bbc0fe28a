r"""The words of a region that differ from those of an earlier version: how they are listed, found, checked and applied.

A region is cut into blocks of 8 KiB, and these into words of two bytes, whatever the dtypes of the tensors in it. So no block and
no word depends on where tensors begin. For each block there is a list of words (``uint16``, little-endian), and lists lie one after
the other in a *payload*:

===========================  =========================================================================================
changed words of the block   its list
===========================  =========================================================================================
none                         empty
n, fewer than half of them   the n places of the words in the block, ascending; then their n values
half of them or more         the block itself
===========================  =========================================================================================

``ends[block]`` (``uint32``) is where the block's list ends, in words from the beginning of the payload. A list that is as long as
its block is the block, because a list of places and values is always shorter. So the payload of a version in which everything
changed is the version; a changed word takes four bytes otherwise, and each block four more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import Aborted, ProtocolError
from weightsync.tensors.change_kernels import CHANGE_BLOCK, apply_changes, check_changes, find_changes, mark_blocks
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.tensors.digest import columns_address

Stop = npt.NDArray[np.int8]
UInt64 = npt.NDArray[np.uint64]

_NEAR = 32 << 10  # words between two lists that are read rather than skipped


def blocks_of(nbytes: int) -> int:
    """Number of blocks of a region of ``nbytes``."""
    return -(-nbytes // CHANGE_BLOCK)


def find(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.uint32],
    payload: npt.NDArray[np.uint16],
    stop: Stop,
) -> int | None:
    """List what differs in ``new`` from ``old``, and make ``old`` equal to ``new``: both ``uint8[nbytes]``, a multiple of 8.

    Returns:
        Words of ``payload`` that are used; ``None`` if it has no room for the list.

    Raises:
        Aborted: Another thread set ``stop[0]``. What ``old`` holds is then not known.
    """
    used = find_changes(
        old.ctypes.data, new.ctypes.data, len(new), ends.ctypes.data, payload.ctypes.data, len(payload), stop.ctypes.data
    )
    if used == -2:
        raise Aborted("looking for the changes of this version was stopped")
    if used < 0:
        old[:] = new
        return None
    return int(used)


@dataclass(eq=False)
class Changes:
    """What changed in one source region of a plan, as far as the tiles of this rank read it.

    Args:
        tables: The tiles, with keys; they read region 0 of the source.
        nbytes: Bytes of the source's shards.
        ends: See :mod:`weightsync.tensors.changes`, ``uint32[blocks]``. Not trusted.

    Raises:
        ProtocolError: The ends are no ends of lists, or a tile reads beyond the region.
    """

    tables: Sequence[CopyTable]
    nbytes: int
    ends: npt.NDArray[np.uint32]

    def __post_init__(self) -> None:
        blocks = blocks_of(self.nbytes)
        used = np.zeros(len(self.ends), np.int64)
        used[:1], used[1:] = self.ends[:1], self.ends[1:].astype(np.int64) - self.ends[:-1]
        words = np.full(blocks, CHANGE_BLOCK // 2, np.int64)
        if blocks:
            words[-1] = (self.nbytes - (blocks - 1) * CHANGE_BLOCK) // 2
        if len(used) != blocks or np.any((used < 0) | (used > words) | ((used < words) & (used % 2 == 1))):
            raise ProtocolError("the source lists more changes than there are words, or lists that overlap")
        self._marks = np.zeros(max(blocks, 1), np.uint8)
        for table in self.tables:
            if mark_blocks(table.table_address, 0, len(table), 0, self.nbytes, self._marks.ctypes.data) >= 0:
                raise ProtocolError("the plan reads beyond the region whose changes are listed")
        self._place(used, blocks)

    def _place(self, used: npt.NDArray[np.int64], blocks: int) -> None:
        """Decide which ranges of the payload are read, and where each list then lies."""
        wanted = np.flatnonzero((self._marks[:blocks] != 0) & (used > 0))
        last = self.ends.astype(np.int64)[wanted]
        first = last - used[wanted]
        begins = np.concatenate([np.ones(1, bool), first[1:] - last[:-1] > _NEAR]) if len(wanted) else np.zeros(0, bool)
        run = np.cumsum(begins) - 1
        starts = first[begins]
        stops = np.concatenate([last[:-1][begins[1:]], last[-1:]])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        self._at = np.zeros(max(blocks, 1), np.int64)
        self._at[wanted] = first - starts[run] + offsets[run]
        self._runs = starts, stops, offsets
        self.words = int(offsets[-1])
        """Words of the payload that this rank reads."""

    def allocate(self) -> None:
        """Take memory for the lists, and for the words that they replace: four bytes for each word of :attr:`words`."""
        self._payload = np.zeros(max(self.words, 1), np.uint16)
        self._kept = np.zeros(max(self.words, 1), np.uint16)

    def table(self, offset: int) -> CopyTable:
        """What is to be read from the source's region, where the payload begins at byte ``offset``."""
        starts, stops, offsets = self._runs
        counts = -(-(stops - starts) * 2 // TILE_BYTES)
        run = np.repeat(np.arange(len(starts)), counts)
        part = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_BYTES
        ones = np.ones(len(run), np.int64)
        return CopyTable(
            region=np.zeros(len(run), np.int32),
            source=offset + 2 * starts[run] + part,
            source_stride=0 * ones,
            target=self._payload.ctypes.data + 2 * offsets[run] + part,
            target_stride=0 * ones,
            rows=ones,
            row_bytes=np.minimum(2 * (stops - starts)[run] - part, TILE_BYTES),
        )

    def check(self) -> None:
        """Raise :class:`~weightsync.errors.ProtocolError` unless the lists that arrived are lists."""
        where = (self.nbytes, self.ends.ctypes.data, self._marks.ctypes.data, self._at.ctypes.data, self._payload.ctypes.data)
        block = check_changes(*where)
        if block >= 0:
            raise ProtocolError(f"the changes of block {block} of the source's region are not in order, or outside of it")

    def predict(self, digests: UInt64, stop: Stop) -> None:
        """Add to ``digests`` (``uint64[rows]``) what the changes would add to them. Keeps the words that would be replaced."""
        self._run(0, digests, stop)

    def apply(self, digests: UInt64, stop: Stop) -> None:
        """Replace the words in the tiles' targets, keep what they were, read them again, and add the difference to ``digests``."""
        self._run(1, digests, stop)
        self._run(3, digests, stop)

    def revert(self, digests: UInt64, stop: Stop) -> None:
        """Write back what was kept, read it again, and add to ``digests`` the difference from it: nothing, if all is well."""
        self._run(2, digests, stop)
        self._run(3, digests, stop)

    def _run(self, step: int, digests: UInt64, stop: Stop) -> None:
        for table in self.tables:
            finished = apply_changes(
                table.table_address, 0, len(table), self.nbytes, self.ends.ctypes.data, self._at.ctypes.data,
                self._payload.ctypes.data, self._kept.ctypes.data, step, digests.ctypes.data, columns_address, stop.ctypes.data,
            )  # fmt: skip
            if finished < len(table):
                raise Aborted("the changes of this version were not all applied: the update was aborted")
