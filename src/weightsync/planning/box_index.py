"""Intersection search over boxes: a prefix tree over dimensions, searched for all queries at once.

Boxes are sorted by group and then dimension by dimension. Boxes with equal intervals in the first dimensions share a node. A query
descends one level at a time by binary search among a node's children. On a grid (FSDP x TP) every step yields exactly the boxes
that intersect the query in that dimension, so the search visits no pair that fails to overlap in a dimension searched so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Int64
from weightsync.planning.geometry import ranges
from weightsync.planning.limits import Stop

_STEP = 1 << 20  # pairs in one step: bounds the memory of a query that intersects many boxes
_QUERIES = 4096


@dataclass(frozen=True, eq=False)
class _GridLevel:
    """Children of one level's nodes, ordered by parent, start, stop. Keys order first by parent, then by rank of the coordinate."""

    values: Int64
    starts: Int64
    reach: Int64
    stops: Int64
    base: int


class BoxIndex:
    """Searchable index of boxes in groups.

    ``order`` sorts the given boxes by group, starts and stops; ``box[i]`` is the distinct box of given row ``i``. The distinct
    boxes are ``group``, ``starts`` and ``stops``. The rows of box ``b`` are ``first[b]`` to ``first[b + 1]`` in ``order``; equal
    boxes keep the order in which they were given. Searches raise :class:`~weightsync.errors.Aborted` once ``stop`` is set.
    """

    def __init__(self, group: Int64, starts: Int64, stops: Int64, stop: Stop | None = None) -> None:
        self._stop = stop or Stop()
        dims = starts.shape[1]
        keys = [group, *(column for dim in range(dims) for column in (starts[:, dim], stops[:, dim]))]
        self.order: Int64 = np.lexsort(keys[::-1])
        fresh = np.zeros(len(group), bool)
        fresh[:1] = True
        for key in keys:
            ordered = key[self.order]
            fresh[1:] |= ordered[1:] != ordered[:-1]
        heads = np.flatnonzero(fresh)
        self.first: Int64 = np.append(heads, len(group))
        self.box: Int64 = np.empty(len(group), np.int64)
        self.box[self.order] = np.cumsum(fresh) - 1
        chosen = self.order[heads]
        self.group, self.starts, self.stops = group[chosen], starts[chosen], stops[chosen]
        self._levels: list[_GridLevel] = []
        parent = self.group
        for dim in range(dims):
            begin, end = self.starts[:, dim], self.stops[:, dim]
            fresh = np.ones(len(chosen), bool)
            fresh[1:] = (np.diff(parent) != 0) | (np.diff(begin) != 0) | (np.diff(end) != 0)
            above, begin, end = parent[fresh], begin[fresh], end[fresh]
            # Ranks replace coordinates: a key is parent * base + rank, which no extent can make overflow.
            values = np.unique(np.concatenate([begin, end]))
            base = len(values) + 1
            reach = np.maximum.accumulate(above * base + np.searchsorted(values, end))
            self._levels.append(_GridLevel(values, above * base + np.searchsorted(values, begin), reach, end, base))
            parent = np.cumsum(fresh) - 1

    def __len__(self) -> int:
        return len(self.group)

    def meeting(
        self, group: Int64, starts: Int64, stops: Int64, count: Callable[[Int64], None] | None = None
    ) -> tuple[Int64, Int64]:
        """Find all pairs (query, box) that share an element, ordered by query and then box.

        Args:
            group: Group of each query, ``int64[queries]``.
            starts: First index of each query, ``int64[queries, dims]``.
            stops: End index of each query, above ``starts``: queries must not be empty.
            count: Called with the queries of a batch of pairs; raises if there are too many.
        """
        overlaps = []
        for pairs in self._descend(0, np.arange(len(group)), group, starts, stops):
            if count is not None:
                count(pairs[0])
            overlaps.append(pairs)
        if len(overlaps) == 1:
            return overlaps[0]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(pair[0] for pair in overlaps)]), np.concatenate([none, *(pair[1] for pair in overlaps)])

    def _descend(self, depth: int, query: Int64, node: Int64, starts: Int64, stops: Int64) -> Iterator[tuple[Int64, Int64]]:
        self._stop.check()
        if depth == len(self._levels):
            yield query, node
            return
        level = self._levels[depth]
        begin, end = starts[query, depth], stops[query, depth]
        low = np.searchsorted(level.reach, node * level.base + np.searchsorted(level.values, begin, "right"))
        high = np.searchsorted(level.starts, node * level.base + np.searchsorted(level.values, end))
        count = np.maximum(high - low, 0)
        if int(count.sum()) > _STEP and len(query) > 1:
            half = len(query) // 2
            yield from self._descend(depth, query[:half], node[:half], starts, stops)
            yield from self._descend(depth, query[half:], node[half:], starts, stops)
            return
        child = ranges(low, count)
        wider = np.repeat(np.arange(len(query)), count)
        real = level.stops[child] > begin[wider]
        if not np.all(real):  # not a grid: intervals of one node overlap
            child, wider = child[real], wider[real]
        yield from self._descend(depth + 1, query[wider], child, starts, stops)

    def collisions(self) -> dict[int, tuple[int, int]]:
        """Find one pair of distinct boxes that overlap, for each group that has one."""
        colliding: dict[int, tuple[int, int]] = {}
        begin = 0
        while begin < len(self):
            queries = np.arange(begin, min(begin + _QUERIES, len(self)))
            if colliding:
                queries = queries[~np.isin(self.group[queries], list(colliding))]
            for query, box in self._descend(0, queries, self.group[queries], self.starts, self.stops):
                other = np.flatnonzero(query != box)
                if len(other):  # one pair a group is enough: a forged layout may have a huge number of pairs
                    groups, head = np.unique(self.group[query[other]], return_index=True)
                    for group, at in zip(groups.tolist(), other[head].tolist(), strict=True):
                        pair = int(query[at]), int(box[at])
                        colliding[group] = (min(pair), max(pair))
                    break
            else:
                begin += _QUERIES
        return colliding


def first_hole(starts: Int64, stops: Int64, within: tuple[Int64, Int64]) -> tuple[list[int], list[int]] | None:
    """Return a region of the box ``within`` that no box holds, or ``None``. The boxes must be disjoint and inside ``within``."""
    begin: list[int] = []
    end: list[int] = []
    dims = starts.shape[1]
    for dim in range(dims):
        outer, limit = int(within[0][dim]), int(within[1][dim])
        cuts = np.unique(np.concatenate([[outer, limit], starts[:, dim], stops[:, dim]]))
        area = np.prod(stops[:, dim + 1 :] - starts[:, dim + 1 :], axis=1)
        change = np.zeros(len(cuts), np.int64)
        np.add.at(change, np.searchsorted(cuts, starts[:, dim]), area)
        np.add.at(change, np.searchsorted(cuts, stops[:, dim]), -area)
        whole = int(np.prod(within[1][dim + 1 :] - within[0][dim + 1 :]))
        incomplete = np.flatnonzero(np.cumsum(change)[:-1] < whole)
        if not len(incomplete):
            return None
        slab = int(incomplete[0])
        begin.append(int(cuts[slab]))
        end.append(int(cuts[slab + 1]))
        across = (starts[:, dim] <= begin[-1]) & (stops[:, dim] >= end[-1])
        starts, stops = starts[across], stops[across]
    return begin, end
