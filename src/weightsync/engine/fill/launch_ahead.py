"""The ring of staging buckets where readers launch: a CUDA stream fills the next bucket while the engine's loader works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from weightsync import failpoints
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, WeightSyncError
from weightsync.tensors.cuda.waiting import wait_for_event
from weightsync.tensors.staging import Staging
from weightsync.transports.base import Completion, Reader

_GRACE = 5.0  # seconds for launches that run when something failed


class LaunchAhead:
    """Fills each bucket by ``readers`` that work on the current stream, in one launch if they combine, and hands it to ``load``.

    Bucket ``k + 1`` is filled while the loader works on ``k``, each on a stream; the order is kept by events, so the host waits
    only one bucket behind, and the device is never without work. With one buffer they alternate. ``digest(first, end)`` queues the
    digests of a bucket's rows after it was filled. Waits for a reader are inside ``reading(reader, bucket)``.
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
        reading: Callable[[Reader, int], AbstractContextManager[None]],
    ) -> None:
        self._reading = reading
        self._readers, self._groups, self._device = readers, groups, device
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
                reads = [reader.submit(bucket, deadline) for reader in self._readers]
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
                    for reader, read in zip(self._readers, reads, strict=True):
                        with self._reading(reader, bucket):
                            read.wait(deadline)  # the next bucket is under way: the device has work meanwhile
                        failpoints.reached("engine.group")
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
