"""Pieces that one target rank receives: one row for each box that comes from one source, and its address there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightsync.arrays import Int32, Int64
from weightsync.errors import PlanMismatch
from weightsync.model import Layout, Manifest
from weightsync.model.layout import decoded, encoded
from weightsync.protocol.messages import PieceColumns

_LIMIT = 2.0**62
_COLUMNS = {
    "source": "<i4",
    "source_region": "<i4",
    "source_offset": "<i8",
    "source_strides": "<i8",
    "target_row": "<i4",
    "starts": "<i8",
    "stops": "<i8",
}


@dataclass(frozen=True, eq=False)
class Pieces:
    """Boxes to fetch, ordered by target row. Together they fill each row of the target's layout exactly once.

    ==============  ===============  ==============================================================
    column          type             meaning
    ==============  ===============  ==============================================================
    source          int32[n]         index into ``sources``, the members that are used
    source_region   int32[n]         which of the source's memory regions holds the piece
    source_offset   int64[n]         bytes from that region's start to the piece's first element
    source_strides  int64[n, dims]   bytes between neighbors in the source
    target_row      int32[n]         row of the target's layout, ascending
    starts, stops   int64[n, dims]   the piece's box, in elements of the whole tensor
    ==============  ===============  ==============================================================
    """

    sources: tuple[str, ...]
    source: Int32
    source_region: Int32
    source_offset: Int64
    source_strides: Int64
    target_row: Int32
    starts: Int64
    stops: Int64

    def __len__(self) -> int:
        return len(self.source)

    def sizes(self) -> Int64:
        """Elements of each piece, ``int64[n]``."""
        sizes: Int64 = np.prod(self.stops - self.starts, axis=1)
        return sizes

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over all columns, compared by both ends of a plan. The names of the sources are not included."""
        state = hashlib.blake2b(f"{len(self)} {self.starts.shape[1]}".encode(), digest_size=16)
        for name, kind in _COLUMNS.items():
            state.update(np.ascontiguousarray(getattr(self, name), kind).data.cast("B") if len(self) else b"")
        return state.hexdigest()

    def to_columns(self) -> PieceColumns:
        """Encode the pieces as a message."""
        return PieceColumns(rows=len(self), dims=int(self.starts.shape[1]), **encoded(self, _COLUMNS))

    @classmethod
    def from_columns(cls, manifest: Manifest, target_layout: Layout, source_count: int, columns: PieceColumns) -> Pieces:
        """Decode and validate the pieces in a message. The sources are named by their numbers.

        Only the source can check that a piece lies inside its region.

        Args:
            manifest: The tensors.
            target_layout: The layout that the pieces must fill.
            source_count: Number of sources that the pieces may refer to.
            columns: The message.

        Raises:
            PlanMismatch: A column has the wrong length, a source does not exist, an offset or stride is negative, a piece lies
                outside its row, rows are out of order, or the pieces do not fill the rows (by volume).
        """
        rows, dims = columns.rows, columns.dims
        if rows < 0 or dims != manifest.dims:
            raise PlanMismatch(
                f"a plan of {rows} pieces and {dims} dimensions does not fit a manifest of {manifest.dims} dimensions"
            )
        pieces = cls(tuple(map(str, range(source_count))), **decoded(columns, rows, dims, _COLUMNS, "a plan", PlanMismatch))
        pieces._check(target_layout, source_count)
        return pieces

    def _check(self, layout: Layout, source_count: int) -> None:
        if not len(self):
            if len(layout):
                raise PlanMismatch(f"a plan without pieces cannot fill {len(layout)} layout rows")
            return
        if self.source.min() < 0 or self.source.max() >= source_count:
            raise PlanMismatch(f"a plan names a source that does not exist; there are {source_count}")
        if self.source_region.min() < 0 or self.source_offset.min() < 0 or self.source_strides.min() < 0:
            raise PlanMismatch("a plan has a negative region, offset or stride")
        row = self.target_row
        if row.min() < 0 or row.max() >= len(layout) or np.any(row[1:] < row[:-1]):
            raise PlanMismatch(f"a plan names layout rows that do not exist or are out of order; there are {len(layout)}")
        for dim in range(self.starts.shape[1]):
            begin, end = self.starts[:, dim], self.stops[:, dim]
            if np.any((begin < layout.starts[row, dim]) | (begin >= end) | (end > layout.stops[row, dim])):
                raise PlanMismatch("a piece of a plan is empty or outside the layout row that it fills")
        reach = self.source_offset + ((self.stops - self.starts).astype(np.float64) * self.source_strides).sum(axis=1)
        if np.any(reach > _LIMIT):
            raise PlanMismatch("a piece of a plan reaches impossibly far into its source")
        # Pieces lie inside their rows, at most 2**60 elements each. Floating point first, because a forged sum could wrap around.
        sizes = self.sizes()
        held = np.bincount(row, weights=sizes, minlength=len(layout))
        exact = np.zeros(len(layout), np.int64)
        begin = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
        exact[row[begin]] = np.add.reduceat(sizes, begin)
        wrong = np.flatnonzero((held > _LIMIT) | (exact != layout.sizes()))
        if len(wrong):
            at = int(wrong[0])
            raise PlanMismatch(
                f"a plan does not fill {len(wrong)} of {len(layout)} layout rows exactly; row {at} would receive {held[at]:.0f} of "
                f"{layout.sizes()[at]} elements"
            )
