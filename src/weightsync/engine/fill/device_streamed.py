"""Streamed delivery on a CUDA device: buckets in its memory, for a loader that takes them there."""

from __future__ import annotations

import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext
from weightsync.engine.fill.launch_ahead import LaunchAhead
from weightsync.engine.fill.receive_ahead import ReceiveAhead
from weightsync.engine.fill.streamed import StreamedFiller
from weightsync.errors import PlanMismatch
from weightsync.model import Layout
from weightsync.protocol.messages import PlanSlice
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants


class DeviceStreamed(StreamedFiller):
    """Fills staging buckets on ``device``.

    If all readers work on the device's current stream, each bucket is filled on a stream of its own (:class:`LaunchAhead`); else a
    thread reads ahead (:class:`ReceiveAhead`). Each bucket is digested in another launch after it was filled. If the engine's
    parameters can be read back, they are digested instead, after the last bucket.
    """

    device: torch.device

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout, device: torch.device) -> None:
        super().__init__(context, plan, layout, device)
        self._pipeline = ReceiveAhead(len(self._groups), context.buffers, self._receive, self._load_and_wait, self.abort)

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        super().prepare(deadline)
        self._digest: DeviceDigest | _NotDigested = _NotDigested()
        if not self._context.engine.can_read_back(build=True):
            self._digest = DeviceDigest(self._context.manifest, self.layout, self.device)
            self._digest.build(self._addresses)
        readers = list(self._readers)
        if all(reader.stream_ordered for reader in readers):
            check_abort = self._context.engine.check_abort
            self._pipeline = LaunchAhead(
                readers, self._staging, self._groups, self.device, self._launch_digest, self._load, check_abort,
                self._readers.reading,
            )  # fmt: skip
        self._stopwatch.lap("tables")

    def _receive(self, bucket: int, deadline: Deadline) -> None:
        self._context.engine.check_abort()
        with torch.cuda.device(self.device):
            self._readers.read(bucket, deadline)
            self._launch_digest(*self._groups[bucket])

    def _launch_digest(self, first: int, end: int) -> None:
        self._digest.launch(first, end, self._constants)

    def _load_and_wait(self, bucket: int, deadline: Deadline) -> None:
        self._load(bucket, deadline)
        wait_for_device(self.device, deadline, "the engine's loader")  # its bucket is filled again after the next

    def _received(self) -> UInt64:
        return self._digest.taken()


class _NotDigested:
    """Stands for the digests of buckets where the engine's parameters are read back."""

    def launch(self, first: int, end: int, constants: DigestConstants = PUBLIC) -> None:
        """Digest nothing."""

    def taken(self) -> UInt64:
        raise PlanMismatch("the loader gave the engine other parameters than it had: restart this rank's weightsync.Engine")
