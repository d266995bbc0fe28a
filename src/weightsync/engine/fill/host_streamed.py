"""Streamed delivery through host memory: bucket ``k + 1`` is received and digested while the loader works on bucket ``k``."""

from __future__ import annotations

import numpy as np

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled
from weightsync.engine.fill.receive_ahead import ReceiveAhead
from weightsync.engine.fill.streamed import StreamedFiller
from weightsync.model import Layout
from weightsync.protocol.messages import PlanSlice
from weightsync.tensors.digest import PUBLIC, DigestConstants


class HostStreamed(StreamedFiller):
    """Fills staging buckets in host memory; readers digest what they read."""

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout) -> None:
        super().__init__(context, plan, layout, None)
        self._pipeline = ReceiveAhead(len(self._groups), context.buffers, self._receive, self._load, self.abort)
        self._digests = np.zeros(len(layout), np.uint64)

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        super().prepare(deadline)
        self._context.engine.can_read_back(build=True)

    def run(self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC) -> Filled:
        """See :meth:`StreamedFiller.run`."""
        self._digests = np.zeros(len(self.layout), np.uint64)
        return super().run(version, deadline, constants)

    def _receive(self, bucket: int, deadline: Deadline) -> None:
        self._read_host(bucket, self._digests, deadline, self._constants)

    def _received(self) -> UInt64:
        return self._digests
