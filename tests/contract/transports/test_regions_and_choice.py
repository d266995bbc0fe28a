"""The region's lock and limits; strangers at an owner's socket; finding and choosing schemes."""

from __future__ import annotations

import fcntl
import gc
import mmap
import socket
import time
from pathlib import Path

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, SharedMemoryTooSmall, StaleSource, TransportUnavailable, VersionError
from weightsync.protocol.messages import Host, Offer
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.host import memory
from weightsync.transports.host.region import EMPTY, PublishedRegion
from weightsync.transports.host.shared_memory import SharedMemory
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import choose, known, transport, transports_for
from weightsync.transports.tcp.transport import Tcp
from weightsync_testing.transport_contract import nothing_left

__all__ = ["nothing_left"]

KEY = b"0123456789abcdef"
pytestmark = pytest.mark.usefixtures("nothing_left")


def test_placing_hides_the_version_until_it_succeeded() -> None:
    with PublishedRegion(100, "d") as region:
        assert region.version == EMPTY
        with region.placing(3):
            assert region.version == EMPTY
        assert region.version == 3
        stamp = region.header.require(3)
        with pytest.raises(ZeroDivisionError), region.placing(4):
            raise ZeroDivisionError
        assert region.version == EMPTY
        with region.placing(3):
            pass
        with pytest.raises(StaleSource):
            region.header.require_unchanged(stamp)
        with pytest.raises(VersionError), region.placing(-1):
            pass


def test_views_outlive_the_region() -> None:
    region = PublishedRegion(1 << 16, "d")
    view = region.payload
    view[:] = 7
    region.close()
    region.close()
    assert int(view.sum()) == 7 << 16
    del view
    gc.collect()


def test_a_closed_reader_unmaps_although_its_error_is_kept() -> None:
    with PublishedRegion(64, "d") as region:
        publisher = SharedMemory().publish(region, KEY, this_host())
        try:
            with region.placing(1):
                pass
            before = _mappings()
            reader = SharedMemory().open(publisher.offer, KEY, Deadline(5))
            reader.prepare([CopyTable.empty()], "d", Deadline(5))
            reader.begin(1, Deadline(5))
            assert _mappings() == before + 1
            with region.placing(2):
                pass
            with pytest.raises(StaleSource) as kept:
                reader.end(Deadline(5))
            reader.close()
            assert _mappings() == before, kept.value
        finally:
            publisher.close()


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weightsync-region")


def test_nobody_can_write_or_shrink_a_region_through_its_descriptor() -> None:
    with PublishedRegion(1 << 16, "d") as region:
        assert region.fd is not None
        assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            mmap.mmap(region.fd, 4096)


def test_too_little_memory_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedMemoryTooSmall, match="1,125,899,906,84"):
        PublishedRegion(1 << 50, "d")
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    with pytest.raises(SharedMemoryTooSmall):
        PublishedRegion(1 << 60, "d")


def test_garbage_and_silence_at_the_socket_harm_nobody() -> None:
    here = this_host()
    with PublishedRegion(64, "d") as region:
        owner = Tcp().publish(region, KEY, here)
        port = int(owner.offer.address.rpartition("/")[0].rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        try:
            strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: everything that there is\r\n\r\n")
            with region.placing(1):
                pass
            source = Tcp().open(owner.offer, KEY, Deadline(5))
            source.prepare([CopyTable.empty()], "d", Deadline(5))
            source.begin(1, Deadline(5))
            source.end(Deadline(5))
            source.close()
        finally:
            started = time.monotonic()
            owner.close()
            assert time.monotonic() - started < 2
            for stranger in strangers:
                stranger.close()


def test_a_wildcard_bind_needs_an_address_to_tell() -> None:
    with PublishedRegion(64, "d") as region:
        with pytest.raises(ConfigurationError, match="advertise"):
            Tcp(bind="0.0.0.0").publish(region, KEY, this_host())
        with pytest.raises(ConfigurationError, match="run key"):
            Tcp().publish(region, b"short", this_host())


def test_unknown_schemes_are_named_with_the_known() -> None:
    assert known()[:5] == ("inproc", "cuda_ipc", "nccl", "shared_memory", "tcp")
    with pytest.raises(ConfigurationError, match="inproc, cuda_ipc, nccl, shared_memory, tcp"):
        transport("pigeon")


def test_the_fastest_way_that_reaches_is_chosen() -> None:
    here = this_host()
    far = Host(name="far", memory="far")
    shared = Offer("shared_memory", "weightsync-" + "0" * 32, here)
    near_tcp = Offer("tcp", "127.0.0.1:80/" + "0" * 32, here)
    far_tcp = Offer("tcp", "10.0.0.1:80/" + "0" * 32, far)
    both = [SharedMemory(), Tcp()]
    assert [offer for _, offer in choose([near_tcp, shared], both, here)] == [shared, near_tcp]
    assert choose([near_tcp, shared], both[1:], here) == [(both[1], near_tcp)]
    assert choose([far_tcp, Offer("shared_memory", shared.address, far)], both, here) == [(both[1], far_tcp)]
    with pytest.raises(TransportUnavailable, match="pigeon"):
        choose([Offer("pigeon", "", far), Offer("tcp", "127.0.0.1:80/" + "0" * 32, far)], both, here)


def test_transports_are_given_by_name_or_made_with_settings() -> None:
    mine = Tcp(encrypt=True)
    assert [one.name for one in transports_for(["shared_memory", mine])] == ["shared_memory", "tcp"]
    assert transports_for([mine]) == (mine,)
    with pytest.raises(ConfigurationError, match="given twice"):
        transports_for(["tcp", mine])
    with pytest.raises(ConfigurationError, match="is a list"):
        transports_for("tcp")
    assert not any(one.traits.shared_fate for one in transports_for(None))
