"""The bytes of one move: straight into an engine's parameters, or bucket by bucket through its loader. And their digests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.links import Route
from weightsync.engine.loading import load_all
from weightsync.engine.read_back import ReadBack
from weightsync.engine.state_machine import EngineSession
from weightsync.errors import PlanMismatch
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.staging import Staging

__all__ = ["Clock", "Filling"]

_RECEIVER_SECONDS = 5.0  # after an abort, a read looks at it every few hundred KiB


@dataclass
class Clock:
    """Seconds spent in each part of a move; parts that overlap are each counted in full.

    What is received is digested in the same pass over memory, so ``digest`` is only what is read again after a loader.
    """

    receive: float = 0.0
    load: float = 0.0
    digest: float = 0.0


class Filling:
    """How one engine rank's memory is filled over a route, in every move of it.

    ``check_abort`` raises once the round was aborted; ``check_memory`` raises if the engine's parameters are other views than those
    that the route was made for, and is called while a device copies; ``progress`` is told the bytes in place, but not of the last
    ones, whose arrival the answer tells.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        calls: EngineSession,
        read_back: ReadBack,
        check_abort: Callable[[], None],
        check_memory: Callable[[], None],
        progress: Callable[[int], None],
    ) -> None:
        self._adapter, self._calls, self._read_back = adapter, calls, read_back
        self._check_abort, self._check_memory, self._progress = check_abort, check_memory, progress

    def run(
        self, route: Route, number: int, clock: Clock, deadline: Deadline
    ) -> tuple[npt.NDArray[np.uint64], Literal["installed", "received"]]:
        """The digest of every row of version ``number``, and whether of the parameters themselves.

        Raises as sources, loaders and deadlines do.
        """
        route.begin(number, deadline)
        found = self._fill(route, number, clock, deadline)
        route.end(deadline)
        return found

    def _fill(
        self, route: Route, number: int, clock: Clock, deadline: Deadline
    ) -> tuple[npt.NDArray[np.uint64], Literal["installed", "received"]]:
        digests = np.zeros(len(route.layout), np.uint64)
        if route.staging is not None:
            if route.device is not None and not route.carried:
                digests = self._stream_device(route, route.staging, digests, clock, deadline)
            else:
                digests = self._stream(route, route.staging, digests, clock, deadline)
            return self._installed(route, digests, clock, deadline)
        if route.device is not None:
            return self._fill_device(route, number, digests, clock, deadline), "installed"
        done = 0
        for group, nbytes in enumerate(route.group_bytes):
            self._receive(route, group, digests, clock, deadline)
            done += nbytes
            self._arrived(route, done)
        return digests, "installed"

    def _fill_device(
        self, route: Route, number: int, digests: npt.NDArray[np.uint64], clock: Clock, deadline: Deadline
    ) -> npt.NDArray[np.uint64]:
        """All mapped sources in one launch, the others in turn, then all rows' digests in another; complete on return.

        The digests are queued before the bytes are there: the device does not wait for the host in between.
        """
        started = time.perf_counter()
        self._check_abort()
        with torch.cuda.device(route.device):
            read = None if route.combined is None else route.combined.submit(0, deadline)
            for source in route.carried:
                self._check_abort()
                source.begin(number, deadline)
                self._check_abort()  # a begin forgets that it was aborted before
                source.read(0, deadline)
                failpoints.reached("engine.group")
                source.end(deadline)
            if route.digest_of is not None:
                route.digest_of.build(route.addresses)
                route.digest_of.launch(0, len(route.layout))
            self._check_memory()
            if read is not None:
                read.wait(deadline)
            received = time.perf_counter()
            if route.digest_of is not None:
                digests = route.digest_of.taken()
        clock.receive += received - started
        clock.digest += time.perf_counter() - received
        return digests

    def _stream_device(
        self, route: Route, staging: Staging, digests: npt.NDArray[np.uint64], clock: Clock, deadline: Deadline
    ) -> npt.NDArray[np.uint64]:
        """Fill buckets of GPU memory beside the engine's loader. The digests of what it was handed, unless all is read back."""
        if route.stream is None:
            return digests
        digest = None if route.settings.reads_back else route.digest_of
        done = 0

        def load(bucket: int) -> None:
            self._load(staging, bucket)

        def progress(bucket: int) -> None:
            nonlocal done
            done += route.group_bytes[bucket]
            self._arrived(route, done)

        waited, worked = route.stream.run(load, self._check_abort, progress, deadline, digest)
        clock.receive += waited
        clock.load += worked
        return digests if digest is None else digest.taken()

    def _arrived(self, route: Route, nbytes: int) -> None:
        if nbytes < route.nbytes:  # that all are here, the answer says
            self._progress(nbytes)

    def _receive_on_device(self, route: Route, bucket: int, clock: Clock, deadline: Deadline) -> None:
        """Fill a bucket in GPU memory of which parts, or all, are carried, and begin to digest it."""
        started = time.perf_counter()
        self._check_abort()
        with torch.cuda.device(route.device):
            if route.combined is not None:
                route.combined.read(bucket, deadline)
            for source in route.carried:
                source.read(bucket, deadline)
                failpoints.reached("engine.group")
            if route.digest_of is not None and not route.settings.reads_back:
                route.digest_of.launch(*route.groups[bucket])
        clock.receive += time.perf_counter() - started

    def _receive(self, route: Route, group: int, digests: npt.NDArray[np.uint64], clock: Clock, deadline: Deadline) -> None:
        started = time.perf_counter()
        self._check_abort()
        for source in route.sources:
            source.read(group, deadline, digests)
            failpoints.reached("engine.group")
        clock.receive += time.perf_counter() - started

    def _stream(
        self, route: Route, staging: Staging, digests: npt.NDArray[np.uint64], clock: Clock, deadline: Deadline
    ) -> npt.NDArray[np.uint64]:
        """Hand bucket k to the engine's loader while bucket k+1 arrives in the other half of the ring."""

        def fetch(bucket: int) -> None:
            if route.device is not None:
                self._receive_on_device(route, bucket, clock, deadline)
            else:
                self._receive(route, bucket, digests, clock, deadline)

        done, count = 0, len(route.groups)
        receiver = ThreadPoolExecutor(1, thread_name_prefix="weightsync-receive")
        arriving = receiver.submit(fetch, 0) if count else None
        try:
            for bucket in range(count):
                if arriving is not None:
                    arriving.result(deadline.remaining("receiving a bucket"))
                ahead = staging.buffers > 1
                arriving = receiver.submit(fetch, bucket + 1) if ahead and bucket + 1 < count else None
                started = time.perf_counter()
                self._load(staging, bucket)
                if route.device is not None:
                    wait_for_device(route.device, deadline, "the engine's loader")  # its bucket is filled anew after the next
                clock.load += time.perf_counter() - started
                if not ahead and bucket + 1 < count:
                    arriving = receiver.submit(fetch, bucket + 1)
                done += route.group_bytes[bucket]
                self._arrived(route, done)
        except BaseException:
            route.abort()  # so that the receiver's thread ends soon
            self._release(route, arriving)
            raise
        finally:
            receiver.shutdown(wait=False, cancel_futures=True)
        if route.device is None or route.digest_of is None or route.settings.reads_back:
            return digests
        return route.digest_of.taken()

    def _release(self, route: Route, arriving: Future[None] | None) -> None:
        """Wait a little for the receiver's thread; if it does not end, let it free the staging that it still writes to."""
        if arriving is None or arriving.cancel():
            return
        with suppress(Exception):  # the error that brought us here is the one to report
            arriving.result(_RECEIVER_SECONDS)
        if not arriving.done():
            route.lend(arriving)

    def _load(self, staging: Staging, bucket: int) -> None:
        self._check_abort()
        load_all(self._calls.load, self._adapter.name, staging.tensors(bucket))

    def _installed(
        self, route: Route, received: npt.NDArray[np.uint64], clock: Clock, deadline: Deadline
    ) -> tuple[npt.NDArray[np.uint64], Literal["installed", "received"]]:
        """Digest the parameters themselves where they are whole, plain copies; else what the loader was given must do."""
        started = time.perf_counter()
        shards = None if self._adapter.loads_late else self._calls.shards()
        digests = self._read_back.digests(shards, route.layout.tensor, deadline)
        if digests is None:
            if route.settings.reads_back and route.device is not None:
                raise PlanMismatch("the loader gave the engine other parameters than it had: restart this rank's weightsync.Engine")
            return received, "received"
        clock.digest += time.perf_counter() - started
        return digests, "installed"
