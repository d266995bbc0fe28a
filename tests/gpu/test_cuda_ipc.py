"""Device memory read across processes: exact, never stale, and no death of either side hurts the other.

With two GPUs or more the reader has another device than the owner, with one the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.gpu.owner_process import HERE, KEY, LAYOUT, SIZES, contents
from tests.gpu.processes import OwnerProcess
from tests.gpu.reader_process import whole
from tests.processes import ChildProcess

from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    LayoutError,
    PeerLost,
    ProtocolError,
    StaleSource,
    TransportUnavailable,
    VersionError,
)
from weightsync.transports.cuda.ipc import CombinedReader, CudaIpc, CudaIpcReader
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, PublishedRegion

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")


class Reader:
    """This process's side: a source and the memory that it fills."""

    def __init__(self, owner: OwnerProcess) -> None:
        self.device = torch.cuda.device_count() - 1
        self.owner = owner
        self.source: CudaIpcReader = CudaIpc(self.device).open(owner.offer, KEY, Deadline(20))
        self.target = torch.zeros(sum(SIZES) + 64, dtype=torch.uint8, device=torch.device("cuda", self.device))
        self.source.prepare([whole(self.target.data_ptr())], LAYOUT, Deadline(20))

    def read(self, version: int) -> None:
        self.target.fill_(255)
        self.source.begin(version, Deadline(20))
        self.source.read(0, Deadline(20))
        self.source.end(Deadline(20))

    def check(self, version: int) -> None:
        got, place = self.target.cpu().numpy(), 0
        for data in contents(self.owner.seed, version):
            assert np.array_equal(got[place : place + len(data)], data)
            place += -(-len(data) // 16) * 16


@pytest.fixture
def owner(seed: int) -> Iterator[OwnerProcess]:
    # Without torch's cache, freed memory really goes back to the driver.
    with OwnerProcess(seed % 1000, PYTORCH_NO_CUDA_MEMORY_CACHING="1") as process:
        yield process


@pytest.fixture
def reader(owner: OwnerProcess) -> Iterator[Reader]:
    one = Reader(owner)
    yield one
    one.source.close()


def test_owner_dies(reader: Reader) -> None:
    reader.owner.tell("place 1")
    reader.source.begin(1, Deadline(20))
    reader.owner.kill()
    with pytest.raises(PeerLost):
        reader.source.read(0, Deadline(20))
    with pytest.raises(PeerLost):
        reader.source.begin(1, Deadline(20))
    reader.source.close()
    assert int(torch.ones(1000, device=reader.target.device).sum()) == 1000  # this process's context is unharmed


def test_reader_dies(owner: OwnerProcess) -> None:
    owner.tell("place 1")
    command = ("-W", "ignore", "-m", "tests.gpu.reader_process", torch.cuda.device_count() - 1, owner.offer.address, 1)
    with ChildProcess(*command) as victim:
        victim.expect("read")
    assert "done" in owner.tell("place 2")
    survivor = Reader(owner)
    survivor.read(2)
    survivor.check(2)
    survivor.source.close()
    started = time.monotonic()
    assert "done" in owner.tell("close")
    assert time.monotonic() - started < 5


def test_owner_gone_before_connecting(owner: OwnerProcess) -> None:
    offer = owner.offer
    owner.close()
    with pytest.raises(PeerLost):
        CudaIpc().open(offer, KEY, Deadline(5))


def test_versions_arrive_exactly_round_after_round(reader: Reader) -> None:
    for version in (1, 2, 5):
        reader.owner.tell(f"place {version}")
        reader.read(version)
        reader.check(version)


def test_another_version_is_refused(reader: Reader) -> None:
    with pytest.raises(StaleSource):
        reader.source.begin(1, Deadline(20))
    reader.owner.tell("place 1")
    with pytest.raises(StaleSource, match="version 2"):
        reader.source.begin(2, Deadline(20))


@pytest.mark.parametrize("change", ["withdraw", "place 2"])
def test_change_during_a_transfer_is_noticed(reader: Reader, change: str) -> None:
    reader.owner.tell("place 1")
    reader.source.begin(1, Deadline(20))
    reader.source.read(0, Deadline(20))
    reader.owner.tell(change)
    with pytest.raises(StaleSource):
        reader.source.end(Deadline(20))


def test_moved_memory_is_exported_anew(reader: Reader) -> None:
    before = reader.owner.tell("place 1")["count"]
    reader.read(1)
    reader.owner.tell("move")
    assert reader.owner.tell("place 2")["count"] == before + 1
    reader.read(2)
    reader.check(2)
    assert reader.owner.tell("place 3")["count"] == before + 1
    reader.read(3)
    reader.check(3)


def test_freed_memory_is_noticed_by_its_owner(reader: Reader) -> None:
    reader.owner.tell("place 1")
    reader.owner.tell("free")
    assert reader.owner.tell("place 2")["error"] == "StaleSource"
    with pytest.raises(StaleSource):
        reader.source.begin(2, Deadline(20))
    with pytest.raises(StaleSource):
        reader.source.begin(1, Deadline(20))


def test_memory_that_cannot_be_exported_is_refused(seed: int) -> None:
    with OwnerProcess(seed % 1000, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as process:
        assert process.hello["error"] == "TransportUnavailable"
        assert "expandable_segments" in process.hello["message"]


def test_wrong_key_and_wrong_layout(reader: Reader) -> None:
    with pytest.raises(AuthenticationError):
        CudaIpc().open(reader.owner.offer, b"another key of the right size", Deadline(20))
    with pytest.raises(StaleSource, match="layout"):
        reader.source.prepare([], "f" * 32, Deadline(20))
    beyond = whole(reader.target.data_ptr())
    beyond.row_bytes[1] += 1
    with pytest.raises(ProtocolError):
        reader.source.prepare([beyond], LAYOUT, Deadline(20))


def test_abort_and_again(reader: Reader) -> None:
    reader.owner.tell("place 1")
    reader.source.begin(1, Deadline(20))
    reader.source.abort()
    with pytest.raises(Aborted):
        reader.source.read(0, Deadline(20))
    reader.read(1)
    reader.check(1)


def test_two_owners_are_read_in_one_launch(reader: Reader) -> None:
    other = OwnerProcess(reader.owner.seed + 1, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    second = Reader(other)
    together = CombinedReader([reader.source, second.source])
    for version in (1, 2):
        for one in (reader, second):
            one.owner.tell("move")
            one.owner.tell(f"place {version}")
            one.target.fill_(255)
            one.source.begin(version, Deadline(20))
        together.read(0, Deadline(20))
        for one in (reader, second):
            one.source.end(Deadline(20))
            one.check(version)
    reader.source.begin(2, Deadline(20))
    second.source.begin(2, Deadline(20))
    other.close()
    with pytest.raises(PeerLost):
        together.read(0, Deadline(20))
    second.source.close()


def test_owner_and_reader_in_one_process() -> None:
    memory = torch.randint(0, 256, (sum(SIZES),), dtype=torch.uint8, device="cuda:0")
    starts = np.cumsum([0, *SIZES[:-1]]).tolist()
    region = CudaRegion(SIZES, LAYOUT, lambda: [memory.data_ptr() + start for start in starts], 0)
    owner = CudaIpc().publish(region, KEY, HERE)
    device = torch.cuda.device_count() - 1
    source = CudaIpc(device).open(owner.offer, KEY, Deadline(20))
    target = torch.zeros(sum(SIZES) + 64, dtype=torch.uint8, device=torch.device("cuda", device))
    source.prepare([whole(target.data_ptr())], LAYOUT, Deadline(20))
    with region.placing(1):
        assert region.version == EMPTY
    source.begin(1, Deadline(20))
    source.read(0, Deadline(20))
    source.end(Deadline(20))
    assert torch.equal(target[: SIZES[0]].cpu(), memory[: SIZES[0]].cpu())
    with pytest.raises(VersionError), region.placing(-1):
        pass
    source.close()
    owner.close()
    region.close()


def test_what_cannot_be_served_is_refused() -> None:
    region = PublishedRegion(16, LAYOUT)
    with pytest.raises(TransportUnavailable, match="host memory"):
        CudaIpc().publish(region, KEY, HERE)
    region.close()
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(LayoutError, match="past its allocation"):
        CudaIpc().publish(CudaRegion([1 << 40], LAYOUT, lambda: [memory.data_ptr()], 0), KEY, HERE)
    with pytest.raises(LayoutError, match="addresses"):
        CudaRegion([1, 2], LAYOUT, lambda: [memory.data_ptr()], 0)
