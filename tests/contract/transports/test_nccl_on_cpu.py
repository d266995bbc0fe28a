"""Scheme ``nccl`` passes the transports' contract, faults included, over sockets and host memory; between GPUs: ``tests/gpu``."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.transports.base import Reader
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync_testing.copy_cases import big
from weightsync_testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")


class TestNccl(TransportContract):
    warm_up = "tests.contract.transports.warm_up:open_a_store"
    where = "tests.contract.transports.nccl_on_cpu:NcclOnCpu"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    buffers: ClassVar[dict[str, str]] = {"cuda": ""}  # host memory stands in for the GPU's
    groups = 50  # each is a launch, and a broadcast over a socket


def test_a_broadcast_that_hangs_in_an_aborted_group_keeps_no_region_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort does not end NCCL's wait for a peer that never came: the thread in it is left behind."""
    from tests.contract.transports.nccl_on_cpu import NcclOnCpu, Sockets

    hung, release = threading.Semaphore(0), threading.Event()

    def hang(self: Sockets, *_: object) -> Sockets:
        hung.release()
        release.wait(60)
        return self

    wanted = big(1 << 16, groups=1)
    before = Path("/proc/self/maps").read_text().count("memfd:weightsync")
    region = PublishedRegion(1 << 16, "d" * 32)
    publisher = NcclOnCpu(buffer_bytes=2 << 20, gather_seconds=0).publish(region, b"k" * 32, this_host())
    reader = NcclOnCpu().open(publisher.offer, b"k" * 32, Deadline(10))
    try:
        with region.placing(1):
            pass
        reader.prepare(wanted.groups, "d" * 32, Deadline(10))
        monkeypatch.setattr(Sockets, "broadcast", hang)
        reader.begin(1, Deadline(1))
        with pytest.raises(WeightSyncError):
            reader.read(0, Deadline(1))
        assert hung.acquire(timeout=10)
        assert hung.acquire(timeout=10)
    finally:
        reader.close()
        publisher.close()
        region.close()
    gc.collect()
    try:
        assert Path("/proc/self/maps").read_text().count("memfd:weightsync") == before
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "weightsync-nccl":
                thread.join(10)


def test_no_timer_of_a_broadcast_outlives_its_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was cancelled refers to readers, and so to the region, until its thread has ended."""
    from tests.contract.transports.nccl_on_cpu import NcclOnCpu

    made: list[threading.Timer] = []

    class EndsLate(threading.Timer):
        def run(self) -> None:
            made.append(self)
            super().run()
            threading.Event().wait(0.5)

    monkeypatch.setattr(threading, "Timer", EndsLate)
    wanted = big(1 << 16, groups=1)
    region = PublishedRegion(1 << 16, "d" * 32)
    publisher = NcclOnCpu(buffer_bytes=2 << 20, gather_seconds=5).publish(region, b"k" * 32, this_host())
    readers = [NcclOnCpu().open(publisher.offer, b"k" * 32, Deadline(10)) for _ in range(2)]
    try:
        with region.placing(1):
            pass
        for reader in readers:
            reader.prepare(wanted.groups, "d" * 32, Deadline(10))
        with ThreadPoolExecutor(2) as pool:  # the first waits for the second, with a timer

            def read(reader: Reader) -> None:
                reader.begin(1, Deadline(10))
                reader.read(0, Deadline(10))
                reader.end(Deadline(10))

            list(pool.map(read, readers))
    finally:
        for reader in readers:
            reader.close()
        publisher.close()
        region.close()
    assert len(made) >= 2
    assert not any(timer.is_alive() for timer in made)
