"""Publishers and readers for transport tests, in this process or in a separate one that can be stopped and killed.

A separate process reads commands from its socket, one JSON object on each line, and answers each with one.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from weightsync.arrays import Bytes
from weightsync.deadline import Deadline
from weightsync.protocol.messages import Offer
from weightsync.transports.base import Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host
from weightsync_testing.copy_cases import Allocate, big
from weightsync_testing.fork_server import ForkServer, named

_ANSWER_SECONDS = 60.0


def make_transport(where: str, arguments: dict[str, Any]) -> Transport:
    """Make the transport of class ``where`` (``"module:Class"``) with ``arguments``."""
    scheme: Transport = named(where)(**arguments)
    return scheme


def allocate_in(buffer: str) -> Allocate | None:
    """Return the buffer class ``buffer`` (``"module:Class"``); ``None`` for an empty name, which means plain host memory."""
    made: Allocate | None = named(buffer) if buffer else None
    return made


def contents(nbytes: int, version: int) -> Bytes:
    """Return the contents of the test's region at ``version``, ``uint8[nbytes]``: random bytes, different for every version."""
    return np.frombuffer(np.random.default_rng(version).bytes(nbytes), np.uint8)


class PublishedHere:
    """Published region of host memory."""

    def __init__(self, nbytes: int, layout_digest: str) -> None:
        self.region = PublishedRegion(nbytes, layout_digest)

    def write(self, data: Bytes) -> None:
        """Replace the contents. Call it inside ``region.placing``."""
        self.region.payload[:] = data


class PublishedOnCuda:
    """Published region of the current CUDA device's memory."""

    def __init__(self, nbytes: int, layout_digest: str) -> None:
        memory = self._memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        device = torch.cuda.current_device()
        sizes, addresses = ((nbytes,), [memory.data_ptr()]) if nbytes else ((), [])
        self.region = CudaRegion(sizes, layout_digest, lambda: addresses, device)

    def write(self, data: Bytes) -> None:
        """See :class:`PublishedHere`."""
        self._memory.copy_(torch.from_numpy(data.copy()))


class OwnerHere:
    """Region in ``memory`` ("host" or "cuda") and its publisher, in this process."""

    def __init__(
        self, where: str, arguments: dict[str, Any], key: bytes, nbytes: int, layout_digest: str, memory: str = "host"
    ) -> None:
        self._nbytes = nbytes
        self._published = (PublishedHere if memory == "host" else PublishedOnCuda)(nbytes, layout_digest)
        self._region = self._published.region
        try:
            self._owner = make_transport(where, arguments).publish(self._region, key, this_host())
        except BaseException:
            self._region.close()
            raise
        self.offer: Offer = self._owner.offer

    def place(self, version: int) -> None:
        """Publish :func:`contents` of ``version``."""
        with self._region.placing(version):
            self._published.write(contents(self._nbytes, version))

    def close(self) -> list[str]:
        """Stop serving. Returns descriptions of leaked resources; empty if there are none."""
        self._owner.close()
        self._owner.close()
        self._region.close()
        return []


_TRANSPORTS = ("host.shared_memory", "tcp.transport", "broadcast.collective")
FORK_SERVER = ForkServer(__name__, *(f"weightsync.transports.{name}" for name in _TRANSPORTS))
"""Fork server of this test process, which forks each :class:`Process`. Most transports build on one of those that it imports."""


class Process:
    """Process from the fork server. Executes commands. Can be stopped and killed."""

    def __init__(self, warm_up: str = "") -> None:
        self._socket, its = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._pid = FORK_SERVER.fork(f"{__name__}:answer", [its.fileno()])
        finally:
            its.close()
        self._lines = self._socket.makefile("r")
        self.before = self.ask({"do": "census", "path": sys.path, "warm_up": warm_up})

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and return its answer; an empty dict if the process ended."""
        self._socket.sendall(msgspec.json.encode(command) + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline() or "{}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end. Idempotent. Does nothing if the process has ended."""
        if self._lines.closed:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ConnectionError):
            while self._lines.readline():
                continue
        self._lines.close()
        self._socket.close()


class OwnerProcess(Process):
    """Region and its publisher in a separate process."""

    def __init__(
        self, where: str, arguments: dict[str, Any], key: bytes, nbytes: int, layout_digest: str, memory: str = "host",
        warm_up: str = "",
    ) -> None:  # fmt: skip
        super().__init__(warm_up)
        self._serving = True
        setting = {
            "where": where, "arguments": arguments, "key": key.hex(), "nbytes": nbytes, "layout_digest": layout_digest,
            "memory": memory,
        }  # fmt: skip
        try:
            self.offer = msgspec.convert(self.ask({"do": "serve", "setting": setting})["offer"], Offer)
        except BaseException:
            self.kill()
            raise

    def place(self, version: int) -> None:
        """Publish :func:`contents` of ``version``."""
        self.ask({"do": "place", "version": version})

    def close(self) -> list[str]:
        """Stop serving. Returns descriptions of leaked resources; empty if there are none."""
        if not self._serving:
            return []
        self._serving = False
        after = self.ask({"do": "close"})
        return [f"{what}: {after[what]}, not {count}" for what, count in self.before.items() if after[what] != count]

    def kill(self) -> None:
        """See :meth:`Process.kill`."""
        self._serving = False
        super().kill()


def _census() -> dict[str, Any]:
    gc.collect()  # as the test's own process does: the frames of an aborted transfer may hold memory in a cycle
    fds = [] if sys.platform != "linux" else os.listdir("/proc/self/fd")
    maps = "" if sys.platform != "linux" else Path("/proc/self/maps").read_text()
    return {"threads": len(threading.enumerate()), "descriptors": len(fds), "regions mapped": maps.count("memfd:weightsync")}


def _begin_reading(command: dict[str, Any]) -> object:
    """Return a reader in the middle of a transfer, and its tiles."""
    source = make_transport(command["where"], command["arguments"]).open(
        msgspec.convert(command["offer"], Offer), bytes.fromhex(command["key"]), Deadline(_ANSWER_SECONDS)
    )
    wanted = big(command["nbytes"], groups=12, allocate=allocate_in(command["buffer"]))
    source.prepare(wanted.groups, command["layout_digest"], Deadline(_ANSWER_SECONDS))
    source.begin(1, Deadline(_ANSWER_SECONDS))
    source.read(0, Deadline(_ANSWER_SECONDS))
    return source, wanted


def answer(descriptors: list[int], argument: None) -> None:
    """Execute commands from a socket until it is closed, and end this process."""
    status = 1
    try:
        _answer_all(socket.socket(fileno=descriptors[0]))
        status = 0
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)  # skips the interpreter's shutdown, which takes longer than most tests


def _answer_all(sock: socket.socket) -> None:
    owner: OwnerHere | None = None
    lent: list[object] = []
    with sock, sock.makefile("r") as lines:
        for line in lines:
            command = json.loads(line)
            reply: dict[str, Any] = {}
            match command["do"]:
                case "census":
                    sys.path[:] = command["path"]
                    if command["warm_up"]:
                        named(command["warm_up"])()
                    reply = _census()
                case "serve":
                    setting = command["setting"]
                    make_transport(setting["where"], setting["arguments"])  # before the census, because its imports are not leaks
                    owner = OwnerHere(**{**setting, "key": bytes.fromhex(setting["key"])})
                    reply = {"offer": msgspec.to_builtins(owner.offer)}
                case "read":
                    lent.append(_begin_reading(command))
                case "place" if owner is not None:
                    owner.place(command["version"])
                case "close" if owner is not None:
                    owner.close()
                    owner = None
                    reply = _census()
            sock.sendall(json.dumps(reply).encode() + b"\n")
