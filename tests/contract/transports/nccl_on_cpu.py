"""Transport ``nccl`` on a machine without a GPU: its own owner, source, frames and tables, in host memory, over sockets.

What stands in is below them: streams that do everything at once, a copy of tiles by ``memmove``, and sockets. Importing
this changes modules of :mod:`weightsync.transports` in what nothing else can use without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast import nccl
from weightsync.transports.broadcast import process_groups as groups
from weightsync.transports.broadcast.nccl import Nccl

__all__ = ["NcclOnCpu"]

_CPU = torch.device("cpu")
_SECONDS = 60.0


class CopyHere:
    """``TileCopy`` that has copied when it returns."""

    table_bytes = 0

    def __init__(
        self, groups: Sequence[Sequence[tuple[CopyTable, Sequence[int]]]], device: torch.device, programs: int = 0
    ) -> None:
        assert device == _CPU
        assert programs
        self._groups = groups

    def launch(self, start: int, stop: int) -> None:
        for group in self._groups[start:stop]:
            for tiles, bases in group:
                columns = (
                    np.array(bases, np.int64)[tiles.region] + tiles.source, tiles.source_stride, tiles.target, tiles.target_stride,
                    tiles.rows, tiles.row_bytes,
                )  # fmt: skip
                for source, apart, target, away, rows, size in np.stack(columns, axis=1).tolist():
                    for row in range(rows):
                        ctypes.memmove(target + row * away, source + row * apart, size)


class Sockets:
    """Meets when it is first used, and ends at once when aborted: what NCCL's process group does."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._meeting = socket.socket()
        self._ways: list[socket.socket] = []
        self._aborted = False

    def _meet(self, deadline: Deadline) -> None:
        meeting = self._meeting
        meeting.settimeout(deadline.remaining("meeting"))
        if self._rank == 0:
            meeting.bind(("127.0.0.1", 0))
            meeting.listen()
            self._store.set("at", str(meeting.getsockname()[1]))
            while len(self._ways) < self._size - 1:
                self._ways.append(meeting.accept()[0])
        else:
            meeting.connect(("127.0.0.1", int(self._store.get("at"))))
            self._ways.append(meeting)
        if self._aborted:
            self.abort()

    def broadcast(self, tensors: list[torch.Tensor], _options: object) -> Sockets:
        deadline = Deadline(_SECONDS)
        try:
            if not self._ways:
                self._meet(deadline)
            memory = memoryview(tensors[0].numpy().data)
            for way in self._ways:
                way.settimeout(deadline.remaining("a broadcast"))
                if self._rank == 0:
                    way.sendall(memory)
                else:
                    self._receive(way, memory)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return self

    def wait(self) -> None:
        return

    def _receive(self, way: socket.socket, memory: memoryview) -> None:
        while len(memory):
            count = way.recv_into(memory)
            if not count:
                raise RuntimeError("the peer is gone")
            memory = memory[count:]

    def abort(self) -> None:
        self._aborted = True
        for one in (*self._ways, self._meeting):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _over_sockets(store: Any, rank: int, size: int, device: torch.device, priority: bool) -> Sockets:
    assert (device, priority) == (_CPU, True)
    return Sockets(rank, size, store)


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        del device

    def wait_stream(self, other: object) -> None:
        del other

    def synchronize(self) -> None:
        return

    record = synchronize


@contextlib.contextmanager
def _nothing(_: object) -> Iterator[None]:
    yield


class _Pinned:
    def __init__(self, memory: Any, device: torch.device) -> None:
        assert device == _CPU
        self._memory, self.address = memory, int(memory.ctypes.data)

    def close(self) -> None:
        self._memory = None


_cuda = SimpleNamespace(
    Stream=_Stream,
    Event=_Stream,
    current_stream=_Stream,
    stream=_nothing,
    device=_nothing,
    synchronize=lambda _: None,
    current_device=lambda: 0,
    is_available=lambda: True,
    mem_get_info=lambda _: (1 << 30, 1 << 30),
)
_torch = SimpleNamespace(**{**torch.__dict__, "cuda": _cuda, "device": lambda *_: _CPU})
_dist = SimpleNamespace(**{**dist.__dict__, "is_nccl_available": lambda: True})

_HERE: dict[Any, dict[str, object]] = {
    groups: {"dist": _dist, "wait_for_device": lambda *_: None, "_nccl": _over_sockets},
    nccl: {
        "TileCopy": CopyHere,
        "Pinned": _Pinned,
        "_name_of_gpu": lambda _: secrets.token_hex(8),  # never the same GPU
        "wait_until_idle": lambda *_: None,
    },
}
for _module, _names in _HERE.items():
    _module.__dict__.update(_names, torch=_torch)


class NcclOnCpu(Nccl):
    """The scheme, as above."""

    def unavailable(self) -> str | None:
        return None
