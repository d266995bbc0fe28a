"""Limits of a plan: pieces are counted before arrays are allocated for them, and planning can be stopped.

A layout takes a few bytes a row. But rows that cut a tensor along different dimensions intersect in as many pieces as the product
of their numbers. So the limits are proportional to the rows that the ranks sent:

=====================  ===========================================================================================
a plan gets at most    pieces
=====================  ===========================================================================================
for one target         262,144, and 16 for each row of the target and of the sources
for all targets        262,144, and 128 for each row of both ends, but never more than :data:`MOST_PIECES`
=====================  ===========================================================================================

With the sharding of real trainers and engines, a target row intersects each source row at most once. A mixture of experts of 18,867
tensors from 64 ranks to 64 ranks has 26 million pieces from 2.4 million rows. A model of a trillion parameters from 256 ranks to 16
ranks has 20 million pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightsync.arrays import Int64
from weightsync.errors import Aborted, LayoutError, few
from weightsync.planning.geometry import Geometries, ShardingIndex

MOST_PIECES = 1 << 25
"""Most pieces of one plan, over all targets."""

_BASE_PIECES = 1 << 18
_PIECES_PER_ROW = 16
_PIECES_PER_ROW_OF_ALL = 128


class Stop:
    """Flag that stops planning on another thread when no caller waits for the plan. Thread-safe."""

    def __init__(self) -> None:
        self._wanted = False

    def set(self) -> None:
        """Let :meth:`check` raise from now on."""
        self._wanted = True

    def check(self) -> None:
        """Raise :class:`~weightsync.errors.Aborted` if :meth:`set` was called."""
        if self._wanted:
            raise Aborted("planning was stopped: its round ended")


class Allowance:
    """Number of pieces that a plan may still have, for each target and in total."""

    def __init__(
        self, sources: ShardingIndex, targets: ShardingIndex, kinds: Geometries, claim: Callable[[int], None] | None = None
    ) -> None:
        self._sources, self._targets, self._kinds = sources, targets, kinds
        self._claim = claim
        source_rows = self._rows(sources)
        rows = np.array([len(layout) for layout in targets.layouts], np.int64)
        self._each = _BASE_PIECES + _PIECES_PER_ROW * (rows + source_rows)
        self._all = min(_BASE_PIECES + _PIECES_PER_ROW_OF_ALL * (int(rows.sum()) + source_rows), MOST_PIECES)
        self.taken: Int64 = np.zeros(len(rows), np.int64)
        """Pieces of each target."""

    def take(self, target: Int64, kind: Int64) -> None:
        """Count pieces by target and geometry, once for every tensor of the geometry.

        Raises:
            LayoutError: There are too many pieces. The message names the target and the sources.
        """
        weights = self._kinds.count[kind]
        # exact in float64: a step has a few million pairs, and no manifest has more than a million tensors
        more = np.bincount(target, weights=weights, minlength=len(self.taken)).astype(np.int64)
        self.taken += more
        over = np.flatnonzero(self.taken > self._each)
        if not len(over) and int(self.taken.sum()) <= self._all:
            if self._claim is not None:
                self._claim(int(more.sum()))
            return
        worst = int(over[0]) if len(over) else int(np.argmax(self.taken))
        whom, allowed = (
            (f"{self._targets.members[worst]} alone", int(self._each[worst]))
            if len(over)
            else (f"{len(self._targets.members)} engine ranks (most of them for {self._targets.members[worst]})", self._all)
        )
        names = few(self._sources.members, 3)
        raise LayoutError(
            f"the plan for {whom} has more than {allowed:,} pieces, too many for target layouts of {self._rows(self._targets):,} "
            f"boxes and source layouts of {self._rows(self._sources):,} boxes ({names}): both ends cut the same tensors finely, "
            "along different dimensions. Shard them alike, or use streamed delivery"
        )

    @staticmethod
    def _rows(sharding: ShardingIndex) -> int:
        return sum(map(len, sharding.layouts))
