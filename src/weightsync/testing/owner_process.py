"""Owners and readers to test transports with, in this process or in one of their own that can be stopped and killed.

A process of their own reads one JSON object a line from its socket and answers with one.
"""

from __future__ import annotations

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
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Offer
from weightsync.testing.copy_cases import Allocate, big
from weightsync.testing.nursery import Nursery, named
from weightsync.transports.base import Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_host

__all__ = ["NURSERY", "OwnerHere", "OwnerProcess", "Process", "allocate_in", "answer", "contents", "make_transport"]

_ANSWER_SECONDS = 60.0


def make_transport(where: str, arguments: dict[str, Any]) -> Transport:
    """The scheme of class ``where`` (``"module:Class"``), made with ``arguments``."""
    scheme: Transport = named(where)(**arguments)
    return scheme


def allocate_in(buffer: str) -> Allocate | None:
    """What makes buffers of class ``buffer`` (``"module:Class"``), or ``None`` (empty) for plain host memory."""
    made: Allocate | None = named(buffer) if buffer else None
    return made


def contents(nbytes: int, version: int) -> npt.NDArray[np.uint8]:
    """What the test's shelf holds at a version: random bytes that differ for every version."""
    return np.frombuffer(np.random.default_rng(version).bytes(nbytes), np.uint8)


class PublishedHere:
    """A region of the host's memory."""

    def __init__(self, nbytes: int, layout_digest: str) -> None:
        self.region = PublishedRegion(nbytes, layout_digest)

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """Replace the contents; within ``region.placing``."""
        self.region.payload[:] = data


class PublishedOnCuda:
    """A region of the current CUDA device's memory."""

    def __init__(self, nbytes: int, layout_digest: str) -> None:
        memory = self._memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        device = torch.cuda.current_device()
        sizes, addresses = ((nbytes,), [memory.data_ptr()]) if nbytes else ((), [])
        self.region = CudaRegion(sizes, layout_digest, lambda: addresses, device)

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        """See :class:`PublishedHere`."""
        self._memory.copy_(torch.from_numpy(data.copy()))


class OwnerHere:
    """A region in ``memory`` ("host" or "cuda") and its publisher in this process."""

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
        """Publish :func:`contents`."""
        with self._region.placing(version):
            self._published.write(contents(self._nbytes, version))

    def close(self) -> list[str]:
        """Stop serving; what was left behind, which must be nothing."""
        self._owner.close()
        self._owner.close()
        self._region.close()
        return []


NURSERY = Nursery(__name__)
"""Of this test process; forks a :class:`Process`."""


class Process:
    """A process from the nursery. Answers questions; can be stopped and killed."""

    def __init__(self, warm_up: str = "") -> None:
        self._socket, its = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._pid = NURSERY.fork(f"{__name__}:answer", [its.fileno()])
        finally:
            its.close()
        self._lines = self._socket.makefile("r")
        self.before = self.ask({"do": "census", "path": sys.path, "warm_up": warm_up})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question; the answer, or nothing if the process ended."""
        self._socket.sendall(msgspec.json.encode(question) + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline() or "{}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill the process and return when it is gone. Safe twice, and after it ended."""
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
    """A shelf and its owner in a process of their own."""

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
        """Put :func:`contents` on the shelf."""
        self.ask({"do": "place", "version": version})

    def close(self) -> list[str]:
        """Stop serving; what was left behind, which must be nothing."""
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
    fds = [] if sys.platform != "linux" else os.listdir("/proc/self/fd")
    maps = "" if sys.platform != "linux" else Path("/proc/self/maps").read_text()
    return {"threads": len(threading.enumerate()), "descriptors": len(fds), "shelves mapped": maps.count("memfd:weightsync")}


def _begin_reading(question: dict[str, Any]) -> object:
    """A reader in the middle of a transfer."""
    source = make_transport(question["where"], question["arguments"]).open(
        msgspec.convert(question["offer"], Offer), bytes.fromhex(question["key"]), Deadline(_ANSWER_SECONDS)
    )
    wanted = big(question["nbytes"], groups=12, allocate=allocate_in(question["buffer"]))
    source.prepare(wanted.groups, question["layout_digest"], Deadline(_ANSWER_SECONDS))
    source.begin(1, Deadline(_ANSWER_SECONDS))
    source.read(0, Deadline(_ANSWER_SECONDS))
    return source, wanted


def answer(descriptors: list[int], argument: None) -> None:
    """Do what is asked over a socket until it is closed, and end this process."""
    status = 1
    try:
        _answer_all(socket.socket(fileno=descriptors[0]))
        status = 0
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)  # without the interpreter's own end, which takes longer than most tests


def _answer_all(sock: socket.socket) -> None:
    owner: OwnerHere | None = None
    lent: list[object] = []
    with sock, sock.makefile("r") as lines:
        for line in lines:
            question = json.loads(line)
            reply: dict[str, Any] = {}
            match question["do"]:
                case "census":
                    sys.path[:] = question["path"]
                    if question["warm_up"]:
                        named(question["warm_up"])()
                    reply = _census()
                case "serve":
                    setting = question["setting"]
                    make_transport(setting["where"], setting["arguments"])  # its imports are no leak
                    owner = OwnerHere(**{**setting, "key": bytes.fromhex(setting["key"])})
                    reply = {"offer": msgspec.to_builtins(owner.offer)}
                case "read":
                    lent.append(_begin_reading(question))
                case "place" if owner is not None:
                    owner.place(question["version"])
                case "close" if owner is not None:
                    owner.close()
                    owner = None
                    reply = _census()
            sock.sendall(json.dumps(reply).encode() + b"\n")
