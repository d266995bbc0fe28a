"""What a plan may cost: its pieces are added up before arrays are made for them, and whoever waits for it can stop it.

A layout is a few bytes a row, but rows that cut a tensor along different dimensions meet each other in as many pieces as the
product of their numbers. So what holds is in proportion to the rows that the ranks sent:

* A target gets at most 262,144 pieces and 16 for each row of its own and of the sources. Sharded as trainers and engines do, a
  target's row meets each source's row once at most.
* All targets together get at most 262,144 pieces and 128 for each row of both sides, and never more than :data:`MOST_PIECES`. A
  mixture of experts of 18,867 tensors from 64 ranks to 64 is 26 million pieces from 2.4 million rows; a model of a trillion
  parameters from 256 ranks to 16 is 20 million.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weightsync.errors import Aborted, LayoutError
from weightsync.planning.geometry import Geometries, Side

__all__ = ["MOST_PIECES", "Allowance", "Stop"]

Int64 = npt.NDArray[np.int64]

MOST_PIECES = 1 << 25
"""Most pieces of one plan, over all of its targets."""

_ANYWAY = 1 << 18
_FOR_A_ROW = 16
_FOR_A_ROW_OF_ALL = 128


class Stop:
    """Tells a thread that plans that nobody waits for the plan any more. Thread-safe."""

    def __init__(self) -> None:
        self._wanted = False

    def set(self) -> None:
        """From now on :meth:`check` raises."""
        self._wanted = True

    def check(self) -> None:
        """Raise :class:`~weightsync.errors.Aborted` if nobody waits any more."""
        if self._wanted:
            raise Aborted("planning was stopped: its round ended")


class Allowance:
    """How many pieces a plan may still have, for each target and in all."""

    def __init__(self, sources: Side, targets: Side, kinds: Geometries, claim: Callable[[int], None] | None = None) -> None:
        self._sources, self._targets, self._kinds = sources, targets, kinds
        self._claim = claim
        given = self._rows(sources)
        rows = np.array([len(layout) for layout in targets.layouts], np.int64)
        self._each = _ANYWAY + _FOR_A_ROW * (rows + given)
        self._all = min(_ANYWAY + _FOR_A_ROW_OF_ALL * (int(rows.sum()) + given), MOST_PIECES)
        self.taken: Int64 = np.zeros(len(rows), np.int64)
        """Pieces of each target."""

    def take(self, target: Int64, kind: Int64) -> None:
        """Count pieces by target and geometry, each once for every tensor of the geometry.

        Raises :class:`~weightsync.errors.LayoutError` naming the target and the sources if there are too many.
        """
        weights = self._kinds.count[kind]
        # exact: a step has some millions of pairs, and no manifest has more than a million tensors
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
            else (f"{len(self._targets.members)} engine ranks ({self._targets.members[worst]} most of them)", self._all)
        )
        sources = self._sources.members
        names = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
        raise LayoutError(
            f"the plan for {whom} has more than {allowed:,} pieces, too many for layouts of {self._rows(self._targets):,} boxes "
            f"there and {self._rows(self._sources):,} at {names}: both sides cut the same tensors finely, along different "
            "dimensions; shard them alike, or use streamed delivery"
        )

    @staticmethod
    def _rows(side: Side) -> int:
        return sum(map(len, side.layouts))
