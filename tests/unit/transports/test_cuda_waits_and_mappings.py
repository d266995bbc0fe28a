"""What concerns a CUDA device without one: every wait for it ends, and no mapping outlives the allocation that it was made of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost, StaleSource, TransportError
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.device_memory import wait_for_devices
from weightsync.tensors.shards import Shard
from weightsync.transports.cuda import ipc, region
from weightsync.transports.cuda.driver import HANDLE_BYTES, Allocation
from weightsync.transports.cuda.ipc import CudaIpc, CudaIpcPublisher, CudaIpcReader
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host import region as host_region
from weightsync.transports.host.region import HEADER_BYTES, Header
from weightsync.transports.hostinfo import this_host

_KEY = b"a key of thirty-two bytes, or so"
_BASE, _OTHER = 1 << 40, 2 << 40
pytestmark = pytest.mark.usefixtures("no_leaks")


class Hung:
    """A CUDA device that does not end its work until the test lets it."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.error: RuntimeError | None = None

    def synchronize(self, _: object) -> None:
        if self.error is not None:
            raise self.error
        self.ends.wait(30)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    device = Hung()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    yield device
    device.ends.set()
    for thread in threading.enumerate():
        if thread.name == "weightsync-cuda-wait":
            thread.join(10)


def test_a_trainer_rank_does_not_wait_for_a_hung_device_for_ever(hung: Hung) -> None:
    held = cast("Shard", SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda", 3))))
    with pytest.raises(DeadlineExceeded, match=r"queued on cuda:3 did not finish within 0\.05 s"):
        wait_for_devices([held], Deadline(0.05))
    hung.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(TransportError, match="illegal memory access"):
        wait_for_devices([held], Deadline(5))
    wait_for_devices([], Deadline(5))


class Driver:
    """Device memory of an owner and the mappings of a reader: a handle tells the base, and nothing else, of an allocation."""

    def __init__(self) -> None:
        self.ids = {_BASE: 1, _OTHER: 2}
        self.log: list[str] = []
        self.mapped = 0

    def allocation(self, address: int, device: int) -> Allocation:
        base = _BASE if address < _OTHER else _OTHER
        return Allocation(base, 4096, self.ids[base], device, True)

    def allocated(self, allocations: tuple[Allocation, ...], _: int) -> bool:
        return all(self.ids[one.base] == one.buffer_id for one in allocations)

    def handle(self, one: Allocation) -> bytes:
        return one.base.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes, _: int) -> int:
        self.mapped += 1
        self.log.append(f"open {int.from_bytes(handle, 'little') >> 40} as {self.mapped}")
        return self.mapped << 50

    def close(self, address: int, _: int) -> None:
        self.log.append(f"close {address >> 50}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module, name, stand_in in (
        (region, "allocation_of", made.allocation),
        (region, "still_allocated", made.allocated),
        (region, "export_handle", made.handle),
        (region, "wait_until_idle", lambda *_: None),
        (ipc, "wait_until_idle", lambda *_: None),
        (ipc, "open_handle", made.open),
        (ipc, "close_handle", made.close),
        (ipc, "this_process", lambda: "another"),
    ):
        monkeypatch.setattr(module, name, stand_in)
    return made


def _transfer(published: CudaRegion, source: CudaIpcReader, version: int) -> tuple[int, ...]:
    with published.placing(version):
        pass
    source.begin(version, Deadline(10))
    source.end(Deadline(10))
    return source.addresses


def test_a_handle_that_comes_again_for_another_allocation_is_mapped_anew(driver: Driver) -> None:
    both, zeros, size = np.array([0, 1], np.int32), np.zeros(2, np.int64), np.full(2, 64, np.int64)
    tiles = CopyTable(both, zeros, size, np.array([1 << 60, 1 << 61]), size, np.ones(2, np.int64), size)
    published = CudaRegion((64, 64), "d", lambda: (_BASE, _OTHER + 128), 0)
    owner = CudaIpcPublisher(published, _KEY, this_host())
    source = CudaIpc(device=0).open(owner.offer, _KEY, Deadline(10))
    try:
        source.prepare([tiles], "d", Deadline(10))
        assert _transfer(published, source, 1) == (1 << 50, (2 << 50) + 128)
        assert _transfer(published, source, 2) == (1 << 50, (2 << 50) + 128)
        driver.ids[_BASE] = 3  # freed, and allocated again at the same address
        assert _transfer(published, source, 3) == (3 << 50, (2 << 50) + 128)
        assert driver.log == ["open 1 as 1", "open 2 as 2", "close 1", "open 1 as 3"], "the other mapping stays"
    finally:
        source.close()
        owner.close()
        published.close()
    assert sorted(driver.log[4:]) == ["close 2", "close 3"]


def test_memory_whose_mapping_failed_is_not_read_where_it_was(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old mapping is gone by then: a launch that reads it would end the engine's CUDA context."""
    one, size = np.zeros(1, np.int32), np.full(1, 64, np.int64)
    tiles = CopyTable(one, np.zeros(1, np.int64), size, np.array([1 << 60]), size, np.ones(1, np.int64), size)
    published = CudaRegion((64,), "d", lambda: (_BASE,), 0)
    owner = CudaIpcPublisher(published, _KEY, this_host())
    source = CudaIpc(device=0).open(owner.offer, _KEY, Deadline(10))
    try:
        source.prepare([tiles], "d", Deadline(10))
        assert _transfer(published, source, 1) == (1 << 50,)
        driver.ids[_BASE] = 3  # freed, and allocated again at the same address
        with monkeypatch.context() as broken, pytest.raises(PeerLost):
            broken.setattr(ipc, "open_handle", _gone)
            _transfer(published, source, 2)
        source.begin(2, Deadline(10))
        source.end(Deadline(10))
        assert source.addresses == (2 << 50,)
    finally:
        source.close()
        owner.close()
        published.close()


def _gone(*_: object) -> int:
    raise PeerLost("the owner's device memory cannot be mapped")


class Restless:
    """The words of a header whose owner never stops to write it."""

    def __init__(self, clock: list[float]) -> None:
        self.count, self._clock = 0, clock

    def __getitem__(self, _: int) -> int:
        self.count += 1
        self._clock[0] += 0.01
        return self.count


def test_a_header_that_is_written_all_the_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    header = Header(np.zeros(HEADER_BYTES, np.uint8))
    header.write_new(0)
    assert header.stamp() == (0, host_region.EMPTY)
    words = Restless(clock)
    monkeypatch.setattr(header, "_words", words)
    monkeypatch.setattr(host_region, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(StaleSource, match="all the time for 1 s"):
        header.stamp()
    assert 60 < words.count < 200
