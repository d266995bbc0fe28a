"""Bring a checkpoint to running engines: read each bucket once, send it to all, and let one that fails hurt only itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from weightsync.adapters.checkpoints import Checkpoint, buckets_of
from weightsync.adapters.clients import Bucket, UpdateClient
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.messages import PauseMode
from weightsync.model import TensorSpec
from weightsync.tensors.digest import digest_box
from weightsync.tensors.shards import torch_dtype

__all__ = ["Pushed", "push"]

_log = logging.getLogger(__name__)
_ABORT_SECONDS = 10.0
_BUFFERS = 2

Step = Callable[[UpdateClient], None]


class Pushed(msgspec.Struct, kw_only=True):
    """What became of one engine."""

    url: str
    engine: str
    ok: bool = False
    verified: bool = False
    """Whether the engine agreed to the digest of every tensor before it served."""
    said: str = ""
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

    def run(self, what: Step) -> None:
        if self.failed:
            return
        try:
            what(self.client)
        except WeightSyncError as error:
            self.failed = True
            self.result.said = f"{type(error).__name__}: {error}"
            if self.result.touched:
                self.abort()

    def abort(self) -> None:
        """Tell the engine that nothing more will come. It stays paused: what it holds has no name."""
        try:
            self.client.abort(Deadline(_ABORT_SECONDS))
        except WeightSyncError as error:
            _log.info("%s could not be told to give its update up: %s", self.client.url, error)


def push(
    checkpoint: Checkpoint,
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

    Holds two buckets in memory: one is read while the other is sent. Engines are paused only after all groups have come about or
    failed. An engine that fails is aborted and not resumed, and the others go on. ``progress`` hears the bytes of each bucket that
    all engines have. No step of an engine takes longer than ``step_timeout`` seconds, and all of it no longer than ``timeout``.
    An exception of this function itself (a file that cannot be read, Ctrl-C) aborts all.
    """
    deadline = Deadline(timeout)
    targets = [_Target(client) for client in clients]
    started = time.monotonic()

    def step() -> Deadline:
        return Deadline(min(step_timeout, deadline.remaining("the push")))

    def always(what: Step) -> Callable[[_Target], Step]:
        return lambda target: what

    def paused(target: _Target) -> Step:
        def run(client: UpdateClient) -> None:
            target.result.touched = True
            client.pause(mode, step())
            client.begin(label, None, deadline)

        return run

    with ThreadPoolExecutor(max(len(targets), 1), thread_name_prefix="weightsync-target") as threads:

        def each(what: Callable[[_Target], Step]) -> None:
            for done in [threads.submit(target.run, what(target)) for target in targets]:
                done.result()  # every step inside has the deadline

        try:
            each(always(lambda client: client.join(step())))
            each(paused)
            digests: dict[str, str] = {}
            buckets = buckets_of(checkpoint.manifest, bucket_bytes)
            for number, bucket in enumerate(_read_ahead(checkpoint, buckets, digests)):
                last = number == len(buckets) - 1

                def send(client: UpdateClient, bucket: Bucket = bucket, last: bool = last) -> None:
                    client.update(bucket, last, step())

                each(always(send))
                if all(target.failed for target in targets):
                    break
                progress(sum(spec.nbytes for spec in bucket.specs))

            def commit(target: _Target) -> Step:
                def run(client: UpdateClient) -> None:
                    said = client.commit(digests, step())
                    client.flush(step())
                    client.resume(step())
                    client.leave(step())
                    target.result.said, target.result.ok, target.result.verified = said, True, client.verifies
                    target.result.seconds = time.monotonic() - started

                return run

            each(commit)
        except BaseException:
            for target in targets:
                if target.result.touched and not target.failed and not target.result.ok:
                    target.abort()
                target.client.leave(Deadline(_ABORT_SECONDS))  # ends what its thread still waits for
            raise
    return [target.result for target in targets]


def _read_ahead(checkpoint: Checkpoint, buckets: Sequence[Sequence[TensorSpec]], digests: dict[str, str]) -> Iterable[Bucket]:
    """Each bucket, with the next one being read meanwhile; its digests are in ``digests`` when it comes."""
    size = max(sum(spec.nbytes for spec in bucket) for bucket in buckets)
    memory = [np.empty(size, np.uint8) for _ in range(min(_BUFFERS, len(buckets)))]

    def read(number: int) -> Bucket:
        specs, into = buckets[number], memory[number % _BUFFERS]
        checkpoint.read(specs, into)
        bucket = Bucket(specs, torch.from_numpy(into))
        for spec, part in zip(specs, bucket.tensors(), strict=True):
            tensor = part.view(torch_dtype(spec.dtype)).view(spec.shape)
            digests[spec.name] = f"{digest_box(tensor, spec.shape, [0] * len(spec.shape)):016x}"
        return bucket

    with ThreadPoolExecutor(1, thread_name_prefix="weightsync-read") as reader:
        coming = reader.submit(read, 0)
        for number in range(len(buckets)):
            bucket = coming.result()
            if number + 1 < len(buckets):
                coming = reader.submit(read, number + 1)
            yield bucket
