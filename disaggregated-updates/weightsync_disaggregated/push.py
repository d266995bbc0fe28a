"""Bring a checkpoint to running engines: read each bucket once, send it to all, and let one that fails hurt only itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from weightsync.arrays import Bytes
from weightsync.closing import Closeable
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.external.checkpoint_files import CheckpointFiles
from weightsync.model import PauseMode, TensorSpec
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import torch_dtype
from weightsync.transports.host.memory import available_bytes
from weightsync_disaggregated.buckets import buckets_of
from weightsync_disaggregated.clients.base import Bucket, UpdateClient

_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_ABORT_SECONDS = 10.0
_BUFFERS = 2


class Pushed(msgspec.Struct, kw_only=True):
    """What became of one engine."""

    url: str
    engine: str
    ok: bool = False
    verified: bool = False
    """Whether the engine agreed to the digest of every tensor before it served."""
    answer: str = ""
    """What the engine made of it, or the error."""
    touched: bool = False
    """Whether it was paused; one that failed after that was not resumed by this."""
    seconds: float = 0.0


class _Target:
    """One engine on its way through an update; after its first error it is left alone."""

    def __init__(self, client: UpdateClient) -> None:
        self.client = client
        self.result = Pushed(url=client.url, engine=client.engine)
        self.failed = False

    def run(self, step: Callable[[_Target], None]) -> None:
        if self.failed:
            return
        try:
            step(self)
        except WeightSyncError as error:
            self.failed = True
            self.result.answer = f"{type(error).__name__}: {error}"
            if self.result.touched:
                self.abort()

    def abort(self) -> None:
        """Tell the engine that nothing more will come. It stays paused: what it holds has no name."""
        try:
            self.client.abort(Deadline(_ABORT_SECONDS))
        except WeightSyncError as error:
            _log.info("%s could not be asked to give its update up: %s", self.client.url, error)


def push(
    checkpoint: CheckpointFiles,
    clients: Sequence[UpdateClient],
    label: str | None,
    *,
    mode: PauseMode = "abort",
    bucket_bytes: int = 256 << 20,
    timeout: float = 3600.0,
    step_timeout: float = 300.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Pushed]:
    """Bring every engine to ``checkpoint`` under ``label``; one result for each, in order. Closes nothing.

    Holds two buckets in memory: one is read while the other is sent. Engines are paused only after the memory was taken, the first
    bucket was read, the engines that can had compared the checkpoint's names, shapes and dtypes with their own, and all groups had
    come about or failed. An engine that fails is aborted and not resumed, and the others go on. ``progress`` hears the bytes of
    each bucket that all engines have. No step of an engine takes longer than ``step_timeout`` seconds, and all of it no longer
    than ``timeout``. An exception of this function itself (a file that cannot be read, Ctrl-C) aborts all.
    """
    deadline = Deadline(timeout)
    targets = [_Target(client) for client in clients]
    started = time.monotonic()

    def step() -> Deadline:
        return Deadline(min(step_timeout, deadline.remaining("the push")))

    def pause(target: _Target) -> None:
        target.result.touched = True
        target.client.pause(mode, step())
        target.client.begin(label, None, step(), deadline)

    def commit(target: _Target) -> None:
        answer = target.client.commit(reading.digests, step())
        target.client.flush(step())
        target.client.resume(step())
        target.client.leave(step())
        target.result.answer, target.result.ok, target.result.verified = answer, True, target.client.verifies
        target.result.seconds = time.monotonic() - started

    buckets = buckets_of(checkpoint.manifest, bucket_bytes)
    with (
        _Reading(checkpoint, buckets) as reading,
        ThreadPoolExecutor(max(len(targets), 1), thread_name_prefix="weightsync-target") as threads,
    ):

        def each(work: Callable[[_Target], None]) -> None:
            for done in [threads.submit(target.run, work) for target in targets]:
                done.result()  # every step inside has the deadline

        try:
            reading.bucket(0, step())
            each(lambda target: target.client.check(checkpoint.manifest, label, step()))
            each(lambda target: target.client.join(step()))
            each(pause)
            for number, bucket in enumerate(reading.in_order(step)):
                last = number == len(buckets) - 1

                def send(target: _Target, bucket: Bucket = bucket, last: bool = last) -> None:
                    target.client.update(bucket, last, step())

                each(send)
                if all(target.failed for target in targets):
                    break
                progress(sum(spec.nbytes for spec in bucket.specs))
            each(commit)
        except BaseException:
            for target in targets:
                if target.result.touched and not target.failed and not target.result.ok:
                    target.abort()
                target.client.leave(Deadline(_ABORT_SECONDS))  # ends what its thread still waits for
            raise
    return [target.result for target in targets]


class _Reading(Closeable):
    """A checkpoint's buckets in order, the next one being read while one is used. Takes its memory, and begins, when it is made.

    Raises :class:`~weightsync.errors.ConfigurationError` where the memory is not there.
    """

    def __init__(self, checkpoint: CheckpointFiles, buckets: Sequence[Sequence[TensorSpec]]) -> None:
        self._checkpoint, self._buckets = checkpoint, buckets
        self.digests: dict[str, str] = {}
        """Of the tensors of every bucket that has come."""
        self._memory = _staging(max(sum(spec.nbytes for spec in bucket) for bucket in buckets), min(_BUFFERS, len(buckets)))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weightsync-read")
        self._coming = self._reader.submit(self._read, 0)

    def bucket(self, number: int, deadline: Deadline) -> Bucket:
        """Return the bucket of this number, which is being read, when it is there. Raises what reading raised."""
        return deadline.result(self._coming, f"reading bucket {number + 1} of the checkpoint")

    def _read(self, number: int) -> Bucket:
        specs, into = self._buckets[number], self._memory[number % _BUFFERS]
        self._checkpoint.read(specs, into)
        bucket = Bucket(specs, torch.from_numpy(into))
        for spec, part in zip(specs, bucket.tensors(), strict=True):
            tensor = part.view(torch_dtype(spec.dtype)).view(spec.shape)
            self.digests[spec.name] = f"{digest_box(tensor, spec.shape, [0] * len(spec.shape)):016x}"
        return bucket

    def in_order(self, limit: Callable[[], Deadline]) -> Iterator[Bucket]:
        """Every bucket; ``limit`` is asked how long to wait for each. The memory of one is read into again after the next."""
        for number in range(len(self._buckets)):
            bucket = self.bucket(number, limit())
            if number + 1 < len(self._buckets):
                self._coming = self._reader.submit(self._read, number + 1)
            yield bucket

    def close(self) -> None:
        """End its thread. A read that hangs is left behind with its memory: nothing ends it, and the engines were notified."""
        self._reader.shutdown(wait=self._coming.done(), cancel_futures=True)


def _staging(nbytes: int, count: int) -> list[Bytes]:
    """Memory for ``count`` buckets of ``nbytes``."""
    free = available_bytes()
    try:
        if free is None or count * nbytes <= free:
            return [np.empty(nbytes, np.uint8) for _ in range(count)]
    except MemoryError:
        pass
    have = "that much is not available" if free is None else f"{free:,} bytes are available"
    raise ConfigurationError(
        f"{count} buckets of {nbytes:,} bytes do not fit into memory, {have}: give smaller ones (bucket_bytes, --bucket); a bucket "
        "is never smaller than the largest tensor"
    )
