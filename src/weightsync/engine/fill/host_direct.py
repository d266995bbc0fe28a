"""Direct delivery in host memory: readers write the engine's parameters and digest them in the same pass."""

from __future__ import annotations

import logging
import time

import numpy as np

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled
from weightsync.engine.fill.staged_changes import DirectFiller
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import PlanSlice
from weightsync.spans import span
from weightsync.tensors.digest import PUBLIC, DigestConstants, digest_rows
from weightsync.tensors.overlaps import overlapping

_log = logging.getLogger(__name__)
_GROUP_BYTES = 32 << 20  # an abort is noticed, and progress is reported, after each group


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
                digests.fill(0)
                digest_rows(self._context.manifest, self.layout, self._addresses, 0, len(self.layout), digests, constants)
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
