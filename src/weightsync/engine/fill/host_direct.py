"""Direct delivery in host memory: readers write the engine's parameters and digest them in the same pass."""

from __future__ import annotations

import time

import numpy as np

from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled, Filler
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import PlanSlice

__all__ = ["HostDirect", "row_groups"]

_GROUP_BYTES = 32 << 20  # an abort is noticed, and progress is reported, after each group


class HostDirect(Filler):
    """Writes the engine's parameters, in host memory at ``addresses``, group by group."""

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout, addresses: tuple[int, ...]) -> None:
        super().__init__(context, plan, layout, row_groups(context.manifest, layout), None, addresses)

    def run(self, version: int, deadline: Deadline) -> Filled:
        """See :meth:`Filler.run`."""
        self._readers.begin(version, deadline)
        digests = np.zeros(len(self.layout), np.uint64)
        seconds, done = 0.0, 0
        for group, nbytes in enumerate(self._group_bytes):
            started = time.perf_counter()
            self._read_host(group, digests, deadline)
            seconds += time.perf_counter() - started
            done += nbytes
            self._report(done)
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
