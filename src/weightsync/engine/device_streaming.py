"""Streamed delivery in GPU memory: buckets are filled on a stream of their own while the engine's loader works on those before."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, WeightSyncError
from weightsync.tensors.cuda.waiting import wait_for_event
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.staging import Staging
from weightsync.transports.base import Completion, Reader

__all__ = ["DeviceStream", "bucket_bytes_for"]

_LEAST, _MOST, _SHARE = 64 << 20, 1 << 30, 32
_GRACE = 5.0  # seconds for launches that run when something failed


def bucket_bytes_for(device: torch.device | None) -> int:
    """The size of a staging bucket if none was given: a 32nd of the device's free memory, from 64 MiB to 1 GiB; host: 256 MiB.

    Measured larger buckets were hardly faster, and two buckets then take a sixteenth of what is free at most.
    """
    if device is None or device.type != "cuda":
        return 256 << 20
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(free // _SHARE, _LEAST), _MOST) & -(2 << 20)


class DeviceStream:
    """One plan's way through staging on a CUDA device: one launch a bucket fills it, from all trainer ranks, where shards lie.

    Bucket ``k + 1`` is filled while the loader works on ``k``, each on a stream; the order is kept by events, so the host waits
    only one bucket behind, and the device is never without work. With one buffer they alternate. ``digest`` takes the digests of a
    bucket in another launch after it was filled; without, that is somebody else's business. Used by one thread.
    """

    def __init__(self, reader: Reader, staging: Staging, groups: list[tuple[int, int]], device: torch.device) -> None:
        self._reader, self._staging, self._groups, self._device = reader, staging, groups, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # for the plan's life: new ones strand memory
        staging.used_by(self._stream)
        for bucket in range(staging.buckets):
            staging.tensors(bucket)  # now, while the engine still serves

    def run(
        self,
        load: Callable[[int], None],
        check: Callable[[], None],
        progress: Callable[[int], None],
        deadline: Deadline,
        digest: DeviceDigest | None,
    ) -> tuple[float, float]:
        """Move everything; ``load(bucket)`` is the engine's loader, ``check`` raises if the round was aborted.

        Returns the seconds that this thread spent waiting for buckets, and in the loader. On return all of both are complete on the
        device. After an error nothing that this began runs any more, or :class:`~weightsync.errors.DeadlineExceeded` says so.
        """
        count, ahead = len(self._groups), self._staging.buffers - 1
        filled: list[tuple[Completion, torch.cuda.Event]] = []
        loaded: list[torch.cuda.Event] = []
        waited = worked = 0.0

        def fill() -> None:
            bucket = len(filled)
            check()
            with torch.cuda.stream(self._stream):
                if bucket > ahead:
                    self._stream.wait_event(loaded[bucket - ahead - 1])
                read = self._reader.submit(bucket, deadline)
                if digest is not None:
                    digest.launch(*self._groups[bucket])
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                filled.append((read, event))

        with torch.cuda.device(self._device):
            own = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(own)
            try:
                for bucket in range(count):
                    while len(filled) < min(bucket + 1 + ahead, count):
                        fill()
                    own.wait_event(filled[bucket][1])
                    started = time.perf_counter()
                    load(bucket)
                    loaded.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    loaded[-1].record(own)
                    worked += time.perf_counter() - started
                    started = time.perf_counter()
                    filled[bucket][0].wait(deadline)  # the next is under way: the device has work meanwhile
                    waited += time.perf_counter() - started
                    progress(bucket)
                if loaded:
                    started = time.perf_counter()
                    wait_for_event(loaded[-1], deadline, "the engine's loader")
                    waited += time.perf_counter() - started
            except BaseException:
                self._drain()
                raise
        return waited, worked

    def _drain(self) -> None:
        """Wait for what was launched; staging must not be freed under it, nor the mapping closed."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        try:
            wait_for_event(event, Deadline(_GRACE), "ending the stream")
        except DeadlineExceeded:
            raise
        except WeightSyncError:
            return  # the device failed; what made this rank fail is what to report
