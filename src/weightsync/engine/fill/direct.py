"""Direct delivery: readers write the engine's parameters, in host memory or on a CUDA device, and their digests are taken there."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from weightsync import failpoints
from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled
from weightsync.engine.fill.staged_changes import DirectFiller
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import PlanSlice
from weightsync.spans import span
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.device_memory import DeviceDigest
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
                    with self._readers.reading(reader, 0):
                        completion.wait(deadline)
                    failpoints.reached("engine.group")
            self._digest.build(self._addresses)
            self._digest.launch(0, len(self.layout), constants)
            self._context.check_memory()  # while the device copies
            for reader, completion in reads:
                if reader.stream_ordered:
                    with self._readers.reading(reader, 0):
                        completion.wait(deadline)
                    failpoints.reached("engine.group")
            received = time.perf_counter()
            with span("digest"):
                digests = self._digest.taken()
        finished = time.perf_counter()
        for reader in self._together:
            reader.end(deadline)
        return Filled(digests, "installed", received - started, digest_seconds=finished - received)
