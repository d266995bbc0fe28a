"""Streamed delivery: whole tensors are staged in buckets, and the engine's own loader takes them bucket by bucket.

Through host memory, bucket ``k + 1`` is received and digested while the loader works on bucket ``k``. On a CUDA device, for a
loader that takes its tensors there, the buckets are in its memory: where readers launch, a CUDA stream fills the next one while the
loader works.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from weightsync.arrays import Bools, UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled, PlanFiller
from weightsync.engine.fill.receive_ahead import ReceiveAhead
from weightsync.engine.readers import Stopwatch
from weightsync.errors import DeadlineExceeded, PlanMismatch, ProtocolError, StaleSource, TransportUnavailable, WeightSyncError
from weightsync.model import Layout
from weightsync.protocol.messages import PlanSlice, Stage
from weightsync.spans import span
from weightsync.tensors.cuda.waiting import wait_for_device, wait_for_event
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.staging import Staging, check_size
from weightsync.transports.base import Completion, Reader
from weightsync.transports.host.memory import available_bytes

_GRACE = 5.0  # seconds for launches that run when something failed


class LaunchAhead:
    """Fills each bucket by ``readers`` that work on the current stream, in one launch if they combine, and hands it to ``load``.

    Bucket ``k + 1`` is filled while the loader works on ``k``, each on a stream; the order is kept by events, so the host waits
    only one bucket behind, and the device is never without work. With one buffer they alternate. ``digest(first, end)`` queues the
    digests of a bucket's rows after it was filled. ``finish(reader, bucket, completion, deadline)`` waits for a reader.
    Used by one thread.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        staging: Staging,
        groups: list[tuple[int, int]],
        device: torch.device,
        digest: Callable[[int, int], None],
        load: Callable[[int, Deadline], None],
        check_abort: Callable[[], None],
        finish: Callable[[Reader, int, Completion, Deadline], None],
    ) -> None:
        self.readers, self.finish = readers, finish
        self._groups, self._device = groups, device
        self._ahead = staging.buffers - 1
        self._digest, self._load, self._check_abort = digest, load, check_abort
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # for the plan's life: new ones strand memory
        staging.used_by(self._stream)
        for bucket in range(staging.buckets):
            staging.tensors(bucket)  # makes the views now, while the engine still serves

    def run(self, done: Callable[[int], None], deadline: Deadline) -> tuple[float, float]:
        """Fill and load every bucket; ``done(bucket)`` is called after each.

        Returns the seconds that this thread spent waiting for buckets, and in the loader. On return all of both are complete on the
        device. After an error nothing that this began runs any more, or :class:`~weightsync.errors.DeadlineExceeded` says so.
        """
        count = len(self._groups)
        filled: list[tuple[list[Completion], torch.cuda.Event]] = []
        loaded: list[torch.cuda.Event] = []
        waited = worked = 0.0

        def fill() -> None:
            bucket = len(filled)
            self._check_abort()
            with torch.cuda.stream(self._stream):
                if bucket > self._ahead:
                    self._stream.wait_event(loaded[bucket - self._ahead - 1])
                reads = [reader.submit(bucket, deadline) for reader in self.readers]
                self._digest(*self._groups[bucket])
                filled.append((reads, _mark(self._stream)))

        with torch.cuda.device(self._device):
            own = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(own)
            with OnFailure(self._drain):
                for bucket in range(count):
                    while len(filled) < min(bucket + 1 + self._ahead, count):
                        fill()
                    reads, in_place = filled[bucket]
                    own.wait_event(in_place)
                    started = time.perf_counter()
                    self._load(bucket, deadline)
                    loaded.append(_mark(own))
                    worked += time.perf_counter() - started
                    started = time.perf_counter()
                    for reader, read in zip(self.readers, reads, strict=True):
                        self.finish(reader, bucket, read, deadline)  # the next bucket is under way: the device has work
                    waited += time.perf_counter() - started
                    done(bucket)
                if loaded:
                    started = time.perf_counter()
                    wait_for_event(loaded[-1], deadline, "the engine's loader")
                    waited += time.perf_counter() - started
        return waited, worked

    def _drain(self) -> None:
        """Wait for what was launched; staging must not be freed under it, nor the mapping closed."""
        try:
            wait_for_event(_mark(self._stream), Deadline(_GRACE), "ending the stream")
        except DeadlineExceeded:
            raise
        except WeightSyncError:
            return  # the device failed; what made this rank fail is what to report

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call ``act`` now: no launch outlives a run, unless the device hangs; then torch keeps the memory."""
        act()


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


_LEAST, _MOST, _SHARE = 64 << 20, 1 << 30, 32


def bucket_bytes_for(device: torch.device | None) -> int:
    """The size of a staging bucket if none was given: a 32nd of the device's free memory, from 64 MiB to 1 GiB; host: 256 MiB.

    Measured larger buckets were hardly faster, and two buckets then take a sixteenth of what is free at most.
    """
    if device is None or device.type != "cuda":
        return 256 << 20
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(free // _SHARE, _LEAST), _MOST) & -(2 << 20)


class StagedTensors:
    """The ``changed`` rows (tensors, ``bool[rows]``) of a version. ``held``, ``uint64[rows]``, are the digests of the one before.

    It is for ``filler`` alone, whose connections are prepared for these rows. Used by one thread, except :meth:`abort`.
    """

    def __init__(self, filler: StreamedFiller, body: Stage, changed: Bools, held: UInt64) -> None:
        self._filler, self.base, self.number, self.changed, self.held = filler, body.base, body.number, changed, held
        specs = [filler.manifest[tensor] for tensor in filler.layout.tensor.tolist()]
        self.names = {spec.name for spec, new in zip(specs, changed, strict=True) if new}
        self.sizes = np.array([spec.nbytes for spec in specs], np.int64) * changed
        """Bytes that each row brings."""
        self.nbytes = int(self.sizes.sum())

    def is_for(self, number: int, filler: object) -> bool:
        """Whether this leads to version ``number``, through the buckets of ``filler``."""
        return self.number == number and self._filler is filler

    def apply(self, deadline: Deadline) -> Filled:
        """Move the tensors, as :meth:`StreamedFiller.run` does. The others count with the digests that they had."""
        return self._filler.run(self.number, deadline, PUBLIC, self)

    def abort(self) -> None:
        """Nothing of it runs by itself."""


class StreamedFiller(PlanFiller):
    """Fills staging buckets on ``device`` (``None``: in host memory), through a pipeline, for the engine's own loader."""

    _pipeline: ReceiveAhead | LaunchAhead
    _staging: Staging
    _some: StagedTensors | None = None  # of the run

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout, device: torch.device | None) -> None:
        self.manifest = context.manifest
        check_size(self.manifest, layout, context.bucket_bytes)
        super().__init__(context, plan, layout, [_rows_of(layout, region) for region in range(len(layout.regions))], device)
        self._some_readers = context.readers  # separate connections: what fails while they are prepared leaves the others usable

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        self._staging = Staging(
            self._context.manifest, self.layout, device=self.device, buffers=self._context.buffers, free=available_bytes()
        )
        self._owned.callback(self._staging.close)
        self._addresses = self._staging.addresses
        self.staging_bytes = self._staging.nbytes
        super().prepare(deadline)
        self._owned.callback(self._some_readers.close)

    def stage(self, body: Stage, held: UInt64, deadline: Deadline) -> tuple[StagedTensors, UInt64]:
        """Connect for the tensors whose digest is another one than ``held``, ``uint64[rows]``. The engine may serve.

        Returns:
            The tensors, and the digests of all rows as they will be.

        Raises:
            ProtocolError: There is not one digest for each tensor.
            StaleSource: Every tensor is another one.
            TransportUnavailable: Readers of the plan's transports share their fate, or other transports came.
            WeightSyncError: What readers raise.
        """
        if len(body.digests) != 8 * len(self.manifest):
            raise ProtocolError(f"{len(body.digests)} bytes of digests came for {len(self.manifest)} tensors")
        wanted = np.frombuffer(body.digests, "<u8").astype(np.uint64)[self.layout.tensor]
        changed = wanted != held
        if changed.all():
            raise StaleSource(f"every tensor has changed since version {body.base}")
        with OnFailure(self._some_readers.close):  # its connections may be beyond use
            if not self._readers.sharing_fate:
                tables = [[table.of_rows(changed) for table in groups] for groups in self._tables]
                self._some_readers.connect(self.plan.sources, tables, self.device, deadline, Stopwatch())
            if self._some_readers.transports != self.transports:
                raise TransportUnavailable(f"{', '.join(self.transports)} cannot read single tensors now")
        return StagedTensors(self, body, changed, held), wanted

    def abort(self) -> None:
        """See :meth:`Filler.abort`."""
        super().abort()
        self._some_readers.abort()

    _constants = PUBLIC  # of the run

    def run(
        self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC, some: StagedTensors | None = None
    ) -> Filled:
        """See :meth:`PlanFiller.run`. The digests are of the parameters where they can be read back, of the buckets otherwise.

        Only ``some`` tensors are moved, if they are given, and the others have the digests that they had.
        """
        self._constants, self._some, self._digests = constants, some, np.zeros(len(self.layout), np.uint64)
        self._reading = self._readers if some is None else self._some_readers
        if isinstance(self._pipeline, LaunchAhead):
            self._pipeline.readers, self._pipeline.finish = list(self._reading), self._reading.finish
        if some is not None:
            self._context.engine.keep([spec.name for spec in self.manifest if spec.name not in some.names])
        self._reading.begin(version, deadline)
        sizes = self._group_bytes if some is None else [int(some.sizes[first:end].sum()) for first, end in self._groups]
        done = 0

        def loaded(bucket: int) -> None:
            nonlocal done
            done += sizes[bucket]
            self._report(done)

        receive_seconds, load_seconds = self._pipeline.run(loaded, deadline)
        started = time.perf_counter()
        with span("digest"):
            installed = self._context.engine.read_back(deadline, constants)
        if installed is not None and np.array_equal(installed[0], self.layout.tensor):
            filled = Filled(installed[1], "installed", receive_seconds, load_seconds, time.perf_counter() - started)
        else:
            digests = self._received()
            digests = digests if some is None else np.where(some.changed, digests, some.held)
            filled = Filled(digests, "received", receive_seconds, load_seconds)
        self._reading.end(deadline)
        return filled

    @abstractmethod
    def _received(self) -> UInt64:
        """The digests of what the loader was handed."""

    def _load(self, bucket: int, deadline: Deadline) -> None:
        """Hand a bucket to the engine's loader."""
        tensors, some = self._staging.tensors(bucket), self._some
        if some is not None:
            tensors = [item for item in tensors if item[0] in some.names]
        if tensors:
            self._context.engine.load(tensors)

    def _digested(self, group: int) -> list[tuple[int, int]]:
        if self._some is None:
            return super()._digested(group)
        first, end = self._groups[group]
        return [(row, row + 1) for row in (first + np.flatnonzero(self._some.changed[first:end])).tolist()]

    def close(self) -> None:
        """See :meth:`Filler.close`. Deferred while a thread may still write to the staging buckets."""
        self._pipeline.when_idle(self._owned.close)


def _rows_of(layout: Layout, region: int) -> tuple[int, int]:
    rows = np.flatnonzero(layout.region == region)
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise PlanMismatch(f"bucket {region} of the plan is empty or its tensors are not consecutive")
    return int(rows[0]), int(rows[-1]) + 1


class HostStreamed(StreamedFiller):
    """Fills staging buckets in host memory; readers digest what they read."""

    def __init__(self, context: FillContext, plan: PlanSlice, layout: Layout) -> None:
        super().__init__(context, plan, layout, None)
        self._pipeline = ReceiveAhead(len(self._groups), context.buffers, self._receive, self._load, self.abort)

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`PlanFiller.prepare`."""
        super().prepare(deadline)
        self._context.engine.can_read_back()

    def _receive(self, bucket: int, deadline: Deadline) -> None:
        self._read_host(bucket, self._digests, deadline, self._constants)

    def _received(self) -> UInt64:
        return self._digests


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
        self._digest: DeviceDigest | None = None  # where the engine's parameters are read back
        if not self._context.engine.can_read_back():
            self._digest = DeviceDigest(self._context.manifest, self.layout, self.device)
            self._digest.build(self._addresses)
        readers = list(self._readers)
        if all(reader.stream_ordered for reader in readers):
            check_abort = self._context.engine.check_abort
            self._pipeline = LaunchAhead(
                readers, self._staging, self._groups, self.device, self._launch_digest, self._load, check_abort,
                self._readers.finish,
            )  # fmt: skip
        self._stopwatch.lap("tables")

    def _receive(self, bucket: int, deadline: Deadline) -> None:
        self._context.engine.check_abort()
        with torch.cuda.device(self.device):
            self._reading.read(bucket, deadline)
            self._launch_digest(*self._groups[bucket])

    def _launch_digest(self, first: int, end: int) -> None:
        if self._digest is not None:
            self._digest.launch(first, end, self._constants)

    def _load_and_wait(self, bucket: int, deadline: Deadline) -> None:
        self._load(bucket, deadline)
        wait_for_device(self.device, deadline, "the engine's loader")  # its bucket is filled again after the next

    def _received(self) -> UInt64:
        if self._digest is None:
            raise PlanMismatch("the loader gave the engine other parameters than it had: restart this rank's weightsync.Engine")
        return self._digest.taken()
