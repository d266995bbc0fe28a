"""How transport ``nixl`` divides a plan, when it is chosen, and what it refuses."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from weightsync.cli import doctor
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, PeerLost, ProtocolError, TransportUnavailable
from weightsync.publishing.publication import ReaderAccess
from weightsync.tensors.copies import copy_tiles
from weightsync.tensors.copy_table import CopyTable
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports import registry
from weightsync.transports.base import Network
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync.transports.net.messages import RegisterTiles, Start
from weightsync_nixl import agent as nixl_agent
from weightsync_nixl.agent import nixl_problem, rdma_devices
from weightsync_nixl.reader import Pack
from weightsync_nixl.staged_frames import BUFFERS, MOST_BUFFER_BYTES, Frames, StagingBuffers, copies, split
from weightsync_nixl.transport import Nixl
from weightsync_testing.copy_cases import tiles_from

needs_nixl = pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")
KEY = b"the key of this contract's runs."


def random_tiles(rng: np.random.Generator, memory: int, count: int) -> tuple[CopyTable, int]:
    """Tiles in order at both ends, some strided, some without a gap between them; and the size of their targets."""
    rows = []
    source = target = 0
    for _ in range(count):
        runs = int(rng.choice([1, 1, 1, 3, 8]))
        nbytes = int(rng.integers(1, 300))
        gap = int(rng.choice([0, 0, 17]))
        stride = nbytes + int(rng.choice([0, 5]))
        rows.append([0, source, stride, memory + target, nbytes, runs, nbytes])
        source += stride * runs - (stride - nbytes) + gap
        target += nbytes * runs
    return tiles_from(np.array(rows, np.int64)), target


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("least", [1, 64, 500, 1 << 30])
def test_direct_pieces_and_frames_are_the_group_without_overlap(seed: int, least: int) -> None:
    rng = np.random.default_rng(seed)
    target = np.zeros(1 << 18, np.uint8)
    tiles, nbytes = random_tiles(rng, int(target.ctypes.data), 60)
    source = rng.integers(1, 256, 1 << 18, dtype=np.uint8)
    address = int(source.ctypes.data)
    copy_tiles(tiles, (address,))
    expected = target.copy()
    assert expected.any()
    pieces, packed = split(tiles, least)
    assert int(pieces[:, 3].sum()) + packed.nbytes == tiles.nbytes == nbytes
    assert not len(pieces) or pieces[:, 3].min() >= least
    target[:] = 0
    for region, offset, to, length in pieces.tolist():
        assert region == 0
        at = to - int(target.ctypes.data)
        assert not target[at : at + length].any()
        target[at : at + length] = source[offset : offset + length]
    frames = Frames.of(packed, np.array([len(packed)], np.int64), 1 << 12)
    staging = StagingBuffers(max(frames.largest, 1), "host", 0)
    pack = copies(frames.copies(staging.addresses, (address,)), "host", 0)
    unpack = copies(frames.copies(staging.addresses, None), "host", 0)
    for number in range(len(frames)):
        pack(number, Deadline(5))
        unpack(number, Deadline(5))
    assert np.array_equal(target, expected)
    if least == 1 << 30:
        assert not len(pieces)
        assert len(frames) > BUFFERS


def test_neighbours_at_both_ends_are_one_piece() -> None:
    rows = np.array([[0, 100 * index, 100, 5000 + 100 * index, 100, 1, 100] for index in range(10)], np.int64)
    pieces, packed = split(tiles_from(rows), 1000)
    assert pieces.tolist() == [[0, 0, 5000, 1000]]
    assert not len(packed)
    rows[5:, 3] += 8  # a gap at the target alone
    pieces, packed = split(tiles_from(rows), 1000)
    assert not len(pieces)
    assert len(packed) == len(rows)


def device_tree(root: Path, **states: str) -> Path:
    for name, state in states.items():
        port = root / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return root


def test_rdma_devices_are_those_with_a_link(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "nowhere") == ()
    tree = device_tree(tmp_path, mlx5_0="4: ACTIVE\n", mlx5_1="1: DOWN\n", mlx5_2="4: ACTIVE\n")
    assert rdma_devices(tree) == ("mlx5_0", "mlx5_2")


@needs_nixl
def test_an_agent_is_made_again_when_a_network_device_was_removed_while_ucx_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    api, made = nixl_agent._api(), list[int]()
    create_backend = api.nixl_agent.create_backend

    def removed_twice(self: object, *arguments: object) -> None:
        made.append(1)
        if len(made) < 3:
            raise RuntimeError("NIXL_ERR_BACKEND")
        create_backend(self, *arguments)

    monkeypatch.setattr(api.nixl_agent, "create_backend", removed_twice)
    nixl_agent.Agent({}).close()
    assert len(made) == 3
    with pytest.raises(TransportUnavailable, match="no way to other hosts"):
        monkeypatch.setattr(api.nixl_agent, "create_backend", lambda *_: made[9])
        nixl_agent.Agent({})


@needs_nixl
def test_it_is_chosen_unnamed_only_where_there_is_an_rdma_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def names(encrypted: bool = False) -> list[str]:
        return [transport.name for transport in registry.transports_for(None, encrypted)]

    where = "weightsync_nixl.transport.rdma_devices"
    monkeypatch.setattr(where, lambda: rdma_devices(tmp_path))
    assert "nixl" not in names()
    assert [transport.name for transport in registry.transports_for(["nixl"])] == ["nixl"]
    device_tree(tmp_path, mlx5_0="4: ACTIVE")
    assert "nixl" in names()
    assert names().index("nixl") < names().index("tcp")
    assert "nixl" not in names(encrypted=True)
    assert "tcp" in names(encrypted=True)


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_module",))
    with pytest.raises(TransportUnavailable, match=r"pip install nixl-cu13"):
        registry.transports_for(["nixl"])


def test_without_the_package_the_error_and_doctor_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(TransportUnavailable, match=r"'nixl' is not installed: pip install \./transport-nixl in a clone"):
        registry.transports_for(["nixl"])
    status, value = doctor._transport("nixl")[:2]
    assert (status, "./transport-nixl" in value) == ("missing", True)


@needs_nixl
def test_doctor_reports_rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weightsync_nixl.transport.rdma_devices", lambda: rdma_devices(tmp_path))
    assert doctor._transport("nixl")[:2] == ("limited", "no RDMA device has a link")
    device_tree(tmp_path, mlx5_0="4: ACTIVE")
    assert doctor._transport("nixl")[1] == "RDMA: mlx5_0"


@needs_nixl
def test_a_run_that_demands_encryption_refuses_it() -> None:
    with pytest.raises(ConfigurationError, match="'nixl' does not encrypt"):
        TrainerRole({"weight": torch.zeros(8)}, ReaderAccess([Nixl()], KEY, this_host(), network=Network(encrypt=True)))


@needs_nixl
def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match=r"no network device mlx9_0; it has .*lo"):
        registry.transports_for([Nixl(devices="lo,mlx9_0:1")])
    assert Nixl(devices="lo").unavailable() is None


@needs_nixl
def test_requests_that_make_no_sense_are_refused() -> None:
    region = PublishedRegion(1 << 16, "d" * 32)
    transport = Nixl()
    publisher = transport.publish(region, KEY, this_host())
    try:
        reader = transport.open(publisher.offer, KEY, Deadline(10))
        try:
            for request in (Pack(0), Pack(-1), Pack(1 << 40), RegisterTiles("d" * 32, b"", b"1"), Start(1, 1.0)):
                with pytest.raises(ProtocolError):
                    reader._asked(reader._connected(Deadline(5)), request, Deadline(5))
        finally:
            reader.close()
    finally:
        publisher.close()
        region.close()


def agents_here() -> int:
    """Agents of this process: each has a segment of UCX's own shared memory or more."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("ucx_shm" in link for link in links)


@needs_nixl
def test_an_error_that_somebody_keeps_does_not_keep_the_agent() -> None:
    """As an engine rank keeps the error of its last round: its frames refer to whatever raised it."""
    kept: list[object] = []
    before = agents_here()
    region = PublishedRegion(1 << 16, "d" * 32)
    transport, publisher = Nixl(), Nixl().publish(region, KEY, this_host())
    try:
        reader = transport.open(publisher.offer, KEY, Deadline(10))
        publisher.close()
        with pytest.raises(PeerLost) as raised:
            reader._header_read.start()  # type: ignore[union-attr]
        kept.append(raised.value)
        with pytest.raises(PeerLost) as raised:
            reader._agent.prepare(
                ("host", np.array([[reader._page.ctypes.data, 64]]), 0), "nobody", ("host", np.array([[1, 64]]), 0), "a peer"
            )
        kept.append(raised.value)
        reader.close()
        kept.append(reader)
    finally:
        publisher.close()
        region.close()
    assert agents_here() == before


@needs_nixl
def test_a_publisher_that_fails_to_describe_its_memory_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, buffers: object) -> None:
        raise TransportUnavailable("its memory went away")

    region = PublishedRegion(1 << 16, "d" * 32)
    publisher = Nixl().publish(region, KEY, this_host())
    monkeypatch.setattr("weightsync_nixl.transport._Registration.describe", fails)
    before = agents_here()
    try:
        with pytest.raises(TransportUnavailable, match="its memory went away"):
            Nixl().open(publisher.offer, KEY, Deadline(10))
        assert agents_here() == before
    finally:
        publisher.close()
        region.close()


@needs_nixl
@pytest.mark.parametrize("nbytes", [1, MOST_BUFFER_BYTES + 1, 1 << 32])
def test_a_publisher_that_asks_for_other_staging_buffers_is_refused(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    with pytest.raises(ConfigurationError, match="at most"):
        Nixl(buffer_bytes=MOST_BUFFER_BYTES + 1)
    region = PublishedRegion(1 << 16, "d" * 32)
    publisher = Nixl().publish(region, KEY, this_host())
    publisher._current.buffer_bytes = nbytes
    before = agents_here()
    try:
        with pytest.raises(ProtocolError, match=r"staging buffers of [\d,]+ bytes"):
            Nixl().open(publisher.offer, KEY, Deadline(10))
        assert agents_here() == before
    finally:
        publisher.close()
        region.close()


@needs_nixl
def test_an_abort_ends_the_measurement_of_a_slow_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source stops in the middle of it: the engine's rank must not wait for it until the round's deadline."""
    region = PublishedRegion(8 << 20, "d" * 32)
    publisher = Nixl().publish(region, KEY, this_host())
    target = np.zeros(8 << 20, np.uint8)
    tiles = tiles_from(np.array([[0, 0, 4096, target.ctypes.data, 4096, 1, 4096]], np.int64))
    step, aborting = nixl_agent.Transfer._step, threading.Event()

    def slow(self: nixl_agent.Transfer, call: str) -> None:
        step(self, call)
        if not aborting.is_set():
            self.running = True
            if call == "check_xfer_state":
                aborting.set()
                reader.abort()

    try:
        reader = Nixl().open(publisher.offer, KEY, Deadline(10))
        monkeypatch.setattr(nixl_agent.Transfer, "_step", slow)
        started = time.monotonic()
        with pytest.raises(Aborted):
            reader.prepare([tiles], "d" * 32, Deadline(30))
        assert time.monotonic() - started < 5
        monkeypatch.undo()
        reader.close()
    finally:
        publisher.close()
        region.close()
