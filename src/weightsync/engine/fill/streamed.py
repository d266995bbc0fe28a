"""Streamed delivery: whole tensors are staged in buckets, and the engine's own loader takes them bucket by bucket."""

from __future__ import annotations

import time
from abc import abstractmethod

import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled, PlanFiller
from weightsync.engine.fill.launch_ahead import LaunchAhead
from weightsync.engine.fill.receive_ahead import ReceiveAhead
from weightsync.errors import PlanMismatch
from weightsync.model import Layout
from weightsync.protocol.messages import PlanSlice
from weightsync.spans import span
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.staging import Staging, check_size
from weightsync.transports.host.memory import available_bytes

_LEAST, _MOST, _SHARE = 64 << 20, 1 << 30, 32


def bucket_bytes_for(device: torch.device | None) -> int:
    """The size of a staging bucket if none was given: a 32nd of the device's free memory, from 64 MiB to 1 GiB; host: 256 MiB.

    Measured larger buckets were hardly faster, and two buckets then take a sixteenth of what is free at most.
    """
    if device is None or device.type != "cuda":
        return 256 << 20
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(free // _SHARE, _LEAST), _MOST) & -(2 << 20)


class StreamedFiller(PlanFiller):
    """Fills staging buckets on ``device`` (``None``: in host memory), through a pipeline, for the engine's own loader."""

    _pipeline: ReceiveAhead | LaunchAhead
    _staging: Staging

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout, device: torch.device | None) -> None:
        check_size(context.manifest, layout, context.bucket_bytes)
        super().__init__(context, plan, layout, [_rows_of(layout, region) for region in range(len(layout.regions))], device)

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        self._staging = Staging(
            self._context.manifest, self.layout, device=self.device, buffers=self._context.buffers, free=available_bytes()
        )
        self._owned.callback(self._staging.close)
        self._addresses = self._staging.addresses
        self.staging_bytes = self._staging.nbytes
        super().prepare(deadline)

    _constants = PUBLIC  # of the run

    def run(self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC) -> Filled:
        """See :meth:`PlanFiller.run`. The digests are those of the parameters where they can be read back, else of the buckets."""
        self._constants = constants
        self._readers.begin(version, deadline)
        done = 0

        def loaded(bucket: int) -> None:
            nonlocal done
            done += self._group_bytes[bucket]
            self._report(done)

        receive_seconds, load_seconds = self._pipeline.run(loaded, deadline)
        started = time.perf_counter()
        with span("digest"):
            installed = self._context.engine.read_back(deadline, constants)
        if installed is not None and np.array_equal(installed[0], self.layout.tensor):
            filled = Filled(installed[1], "installed", receive_seconds, load_seconds, time.perf_counter() - started)
        else:
            filled = Filled(self._received(), "received", receive_seconds, load_seconds)
        self._readers.end(deadline)
        return filled

    @abstractmethod
    def _received(self) -> UInt64:
        """The digests of what the loader was handed."""

    def _load(self, bucket: int, deadline: Deadline) -> None:
        """Hand a bucket to the engine's loader."""
        self._context.engine.load(self._staging.tensors(bucket))

    def fits(self, plan: PlanSlice, addresses: tuple[int, ...]) -> bool:
        """See :meth:`PlanFiller.fits`. Where the parameters are makes no difference to a loader."""
        return self._serves(plan)

    def close(self) -> None:
        """See :meth:`Filler.close`. Deferred while a thread may still write to the staging buckets."""
        self._pipeline.when_idle(self._owned.close)


def _rows_of(layout: Layout, region: int) -> tuple[int, int]:
    rows = np.flatnonzero(layout.region == region)
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise PlanMismatch(f"bucket {region} of the plan is empty or its tensors are not consecutive")
    return int(rows[0]), int(rows[-1]) + 1
