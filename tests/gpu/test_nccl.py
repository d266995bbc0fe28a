"""Scheme ``nccl`` between GPUs: every byte of every version, who dies holds up nobody for long, and whole rounds by it.

An owner, readers and engines in processes of their own, each on a GPU of its own, as NCCL demands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tests.gpu.engine_process import Model, fingerprint
from tests.gpu.owner_process import HERE, KEY, LAYOUT, SIZES, contents
from tests.gpu.processes import Joined, OwnerProcess, change, fingerprint_of, on_two_gpus
from tests.gpu.reader_process import whole
from tests.processes import ChildProcess

from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, PeerLost, StaleSource, TransportUnavailable, WeightSyncError
from weightsync.protocol.messages import Offer
from weightsync.server.server import BackgroundServer
from weightsync.transports.broadcast.nccl import Nccl

pytestmark = on_two_gpus
pytest.importorskip("triton", reason="needs Triton")


class Reader:
    """This process's side, on the last GPU."""

    def __init__(self, owner: OwnerProcess, device: int | None = None) -> None:
        self.owner = owner
        number = torch.cuda.device_count() - 1 if device is None else device
        with torch.cuda.device(number):
            self.source = Nccl().open(Offer("nccl", owner.hello["address"], HERE), KEY, Deadline(30))
        self.target = torch.zeros(sum(SIZES) + 64, dtype=torch.uint8, device=torch.device("cuda", number))

    def prepare(self) -> Reader:
        self.source.prepare([whole(self.target.data_ptr())], LAYOUT, Deadline(30))
        return self

    def read(self, version: int) -> None:
        self.target.fill_(255)
        self.source.begin(version, Deadline(30))
        self.source.read(0, Deadline(30))
        self.source.end(Deadline(30))

    def check(self, version: int) -> None:
        got, place = self.target.cpu().numpy(), 0
        for data in contents(self.owner.seed, version):
            assert np.array_equal(got[place : place + len(data)], data)
            place += -(-len(data) // 16) * 16


@pytest.fixture
def owner(seed: int) -> Iterator[OwnerProcess]:
    with OwnerProcess(seed % 1000, "nccl") as process:
        yield process


@pytest.fixture
def reader(owner: OwnerProcess) -> Iterator[Reader]:
    one = Reader(owner).prepare()
    yield one
    one.source.close()


@pytest.fixture
def joined() -> Iterator[Joined]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ExitStack() as owned:
        yield Joined(server, owned)


def test_each_version_brings_its_own_bytes_also_after_the_memory_moved(owner: OwnerProcess, reader: Reader) -> None:
    for version in (1, 2, 3):
        owner.tell(f"place {version}")
        reader.read(version)
        reader.check(version)
        owner.tell("move")
    with pytest.raises(StaleSource):
        reader.read(2)


def test_an_owner_that_dies_is_noticed_at_once_before_and_after_the_group_has_met(seed: int) -> None:
    for met in (False, True):
        with OwnerProcess(seed % 1000, "nccl") as owner:
            reader = Reader(owner).prepare()
            owner.tell("place 1")
            if met:
                reader.read(1)
            reader.source.begin(1, Deadline(30))
            owner.kill()
            started = time.monotonic()
            with pytest.raises(WeightSyncError) as caught:
                reader.source.read(0, Deadline(30))
                reader.source.end(Deadline(30))
            assert isinstance(caught.value, PeerLost), caught.value
            assert time.monotonic() - started < 10
            reader.source.close()


def test_a_reader_that_dies_leaves_the_owner_to_the_next(owner: OwnerProcess) -> None:
    owner.tell("place 1")
    last = torch.cuda.device_count() - 1
    command = ("-W", "ignore", "-m", "tests.gpu.reader_process", last, owner.hello["address"], 1, "nccl")
    with ChildProcess(*command) as victim:
        victim.expect("read")
        victim.expect("begun")
    started = time.monotonic()
    reader = Reader(owner).prepare()
    reader.read(1)
    reader.check(1)
    reader.source.close()
    assert time.monotonic() - started < 20


def test_an_abort_ends_a_read_that_waits(owner: OwnerProcess, reader: Reader) -> None:
    owner.tell("place 1")
    reader.read(1)
    reader.source.begin(1, Deadline(30))
    reader.source.abort()
    started = time.monotonic()
    with pytest.raises(Aborted):
        reader.source.read(0, Deadline(30))
    assert time.monotonic() - started < 10
    reader.read(1)
    reader.check(1)


def test_the_owners_own_gpu_is_refused_while_nothing_is_paused(owner: OwnerProcess) -> None:
    reader = Reader(owner, device=0)
    with pytest.raises(TransportUnavailable, match="cuda_ipc"):
        reader.prepare()
    reader.source.close()


@pytest.mark.parametrize("delivery", ["auto", "streamed"])
def test_versions_reach_an_engine_by_nccl(joined: Joined, delivery: str) -> None:
    source = Model().to("cuda:0")
    trainer = joined.trainer(source, transports=["nccl"])
    engine = joined.process("far", delivery=delivery, transport="nccl")
    for number in (1, 2, 3):
        change(source, number)
        result = trainer.publish(number, timeout=60)
        assert result.ok, result
        (replica,) = result.replicas
        expected = ("direct" if delivery == "auto" else "streamed", ("nccl",), "installed")
        assert (replica.delivery, replica.transports, replica.verified) == expected
        assert fingerprint_of(engine) == fingerprint(source)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_replicas_that_want_the_same_share_a_broadcast_and_a_lost_one_does_not_stay_in_the_way(joined: Joined) -> None:
    source = Model().to("cuda:0")
    trainer = joined.trainer(source, transports=["nccl"])
    engines = [joined.process(f"r{device}", transport="nccl", device=f"cuda:{device}") for device in (1, 2)]
    for number in (1, 2):
        change(source, number)
        assert trainer.publish(number, timeout=60).ok
        assert {fingerprint_of(one) for one in engines} == {fingerprint(source)}
    engines[0].kill()
    change(source, 3)
    result = trainer.publish(3, timeout=60)
    assert [one.version for one in result.replicas if one.name == "r2"] == [3]
    assert fingerprint_of(engines[1]) == fingerprint(source)


def test_shards_in_host_memory_reach_a_gpu(joined: Joined) -> None:
    source = Model()
    trainer = joined.trainer(source, transports=["nccl"])
    engine = joined.process("far", transport="nccl")
    for number in (1, 2):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        result = trainer.publish(number, timeout=60)
        assert result.ok, result
        assert result.replicas[0].transports == ("nccl",)
        assert fingerprint_of(engine) == fingerprint(source)


def test_memory_that_cannot_be_mapped_goes_by_nccl(joined: Joined) -> None:
    engine = joined.process("far", transport="nccl")
    environment = {
        "WEIGHTSYNC_COORDINATOR": joined.server.url, "WEIGHTSYNC_TOKEN": joined.server.token,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    with ChildProcess("-W", "ignore", "-m", "tests.gpu.nccl_trainer", 2, environment=environment) as trainer:
        for _ in range(2):
            report = json.loads(trainer.line())
            assert (report["ok"], report["transports"], report["schemes"]) == (True, ["nccl"], ["nccl"])
            assert fingerprint_of(engine) == report["published"]
            trainer.write()
