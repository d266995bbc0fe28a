"""What a forked child does with what it inherits: nothing that its parent, or the parent's peers, could notice."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from weightsync import forks
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous
from weightsync.transports.host.memory import map_read_only
from weightsync.transports.host.region import EMPTY, PublishedRegion
from weightsync.transports.host.shared_memory import SharedMemory
from weightsync.transports.hostinfo import this_host
from weightsync.transports.tcp.transport import Tcp

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc")]

KEY = b"the key of the runs of this test"
SECONDS = 10.0


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """A forked child that does ``body`` and then lives on until the block ends; ``body`` must not have raised."""
    (goes_on, go), (done, say) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, for forking with threads: what is tried here
        pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(go)
            body()
            gc.collect()
            os.write(say, b"+")
            os.read(goes_on, 1)
            status = 0
        except BaseException:  # noqa: BLE001 - a child must not go on as a second test run
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(goes_on)
    os.close(say)
    try:
        assert select.select([done], [], [], SECONDS)[0]
        assert os.read(done, 1) == b"+"
        yield pid
    finally:
        os.close(go)
        os.close(done)
        assert os.waitpid(pid, 0)[1] == 0


def nothing() -> None:
    """A child that only lives."""


def regions_in(pid: int) -> list[str]:
    root = Path(f"/proc/{pid}")
    links = [os.readlink(link) for link in (root / "fd").iterdir()]
    return [line for line in [*(root / "maps").read_text().splitlines(), *links] if "memfd:weightsync" in line]


def ended(sock: socket.socket) -> bool:
    """Whether the other end is closed, within two seconds."""
    sock.settimeout(2.0)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


class Owner:
    """Something that a child gives up."""


def test_an_action_that_raises_does_not_keep_the_others_from_running(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's own would keep it in the child

    def raises(owner: Owner) -> None:
        raise ValueError("a bug in an action")

    first, (mine, theirs) = Owner(), socket.socketpair()
    forks.in_children(first, raises)
    forks.in_children(mine, lambda sock: forks.silence(sock.fileno()))
    with theirs, child(nothing):
        mine.close()
        assert ended(theirs), "the child still has the other end"
    assert "a bug in an action" in capfd.readouterr().err


def test_a_child_can_neither_change_nor_keep_a_region() -> None:
    with PublishedRegion(8192, "layout") as region:
        with region.placing(7):
            region.payload[:] = 9
        assert region.fd is not None
        held, reader = region.payload, map_read_only(region.fd, 8192)

        def unwind() -> None:
            assert region.version == EMPTY
            with pytest.raises(ConfigurationError, match="forked child"):
                region.address  # noqa: B018
            with pytest.raises(ConfigurationError, match="forked child"), region.placing(8):
                pass
            assert not held.any()
            assert not reader.any()
            held[:] = 1  # would be a crash, or the parent's weights
            region.header.invalidate()
            region.close()
            region.close()
            np.ones(1 << 22)  # whatever comes to lie where the region was

        with child(unwind) as pid:
            assert regions_in(pid) == []
            assert region.version == 7
            assert (held == 9).all()
            assert reader[4096:].tolist() == [9] * 4096
        held = reader = np.empty(0, np.uint8)


@pytest.mark.parametrize("scheme", [Tcp(), Tcp(encrypt=True), SharedMemory()], ids=["tcp", "encrypted", "shared_memory"])
def test_a_child_closes_nothing_of_a_transport_and_holds_nothing(scheme: Tcp | SharedMemory) -> None:
    with PublishedRegion(4096, "layout") as region:
        owner = scheme.publish(region, KEY, this_host())
        source = scheme.open(owner.offer, KEY, Deadline(SECONDS))

        def unwind() -> None:
            source.abort()
            source.close()
            owner.close()
            owner.close()

        with child(unwind):
            source.prepare([], "layout", Deadline(SECONDS))
            other = scheme.open(owner.offer, KEY, Deadline(SECONDS))
            other.prepare([], "layout", Deadline(SECONDS))
            other.close()
            readers = list(owner._listener._channels)
            source.close()
            for thread in [owner._listener._channels[channel] for channel in readers if channel in owner._listener._channels]:
                thread.join(2.0)
                assert not thread.is_alive(), "the owner does not notice that its reader is gone, since the child holds the socket"
            owner.close()


def test_a_child_holds_no_connection_of_an_event_loop() -> None:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, tuple[str, int]]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"+")
            await stop.wait()
            writer.close()
            await writer.wait_closed()
            left.append(writer)
            if len(left) == 2:
                both.set()

        left: list[asyncio.StreamWriter] = []
        both = asyncio.Event()
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            started.set_result((asyncio.get_running_loop(), stop, server.sockets[0].getsockname()))
            await both.wait()

    thread = threading.Thread(target=lambda: forks.run(serve()))
    thread.start()
    loop, stop, address = started.result(SECONDS)
    with socket.create_connection(address, SECONDS) as client:
        assert client.recv(1) == b"+"

        def unwind() -> None:
            selector = loop._selector  # type: ignore[attr-defined]
            for fd in list(selector.get_map()):
                selector.unregister(fd)  # as destructors would: of the parent's connections, if the queue of events were shared

        with child(unwind), socket.create_connection(address, SECONDS) as another:
            assert another.recv(1) == b"+", "the parent does not listen any more"
            loop.call_soon_threadsafe(stop.set)
            thread.join(SECONDS)
            assert ended(client)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, SECONDS)


class Endless:
    """Stands for a process group or a store, whose destructor waits for a thread of the parent's."""

    def __del__(self) -> None:
        if os.getpid() != PARENT:
            os._exit(9)


PARENT = os.getpid()


def test_a_child_destroys_no_group() -> None:
    class Listening(StoreRendezvous):
        def __init__(self) -> None:
            self._store = self.client = Endless()
            forks.in_children(self, StoreRendezvous._inherited)

    lent: list[ProcessGroup | StoreRendezvous] = [ProcessGroup("g", "gloo", 0, 2, Endless(), Endless()), Listening()]

    def unwind() -> None:
        for one in lent:
            one.close()
        lent.clear()

    with child(unwind):
        pass


def test_descriptors_that_a_child_gives_up_keep_their_numbers() -> None:
    first, second = socket.socketpair()
    with first, second:

        def give_up() -> None:
            forks.silence(first.fileno())
            assert os.readlink(f"/proc/self/fd/{first.fileno()}") == os.devnull
            with open(os.devnull) as file:
                assert file.fileno() != first.fileno()

        with child(give_up):
            first.sendall(b"+")
            assert second.recv(1) == b"+"
