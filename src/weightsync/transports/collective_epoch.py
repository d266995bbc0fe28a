"""The sender's end of one process group: a few readers, the same buffers, as many broadcasts as come before its members change."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost
from weightsync.tensors.copies import gather_tiles
from weightsync.tensors.tiles import Tiles
from weightsync.transports.frames import DATA, HEADER, FrameHeader
from weightsync.transports.groups import Group, Rendezvous, init_custom_process_group

__all__ = ["Epoch"]


class Epoch:
    """Made with :meth:`opened`, then joined, then used by one thread at a time, but for :meth:`close`."""

    def __init__(self, rendezvous: Rendezvous, size: int, buffer_bytes: int, num_buffers: int, interface: str) -> None:
        self.name = secrets.token_hex(16)
        self.buffer_bytes = buffer_bytes
        self.port = rendezvous.port
        self._rendezvous: Rendezvous | None = rendezvous
        self._size, self._interface = size, interface
        self._buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(num_buffers)]
        self._group: Group | None = None
        self._closed = False

    @classmethod
    def opened(cls, address: str, readers: int, buffer_bytes: int, num_buffers: int, deadline: Deadline) -> Epoch:
        """A group that ``readers`` may join now, at ``address`` and :attr:`port`. Allocates the buffers."""
        return cls(Rendezvous(address, readers + 1, deadline), readers + 1, buffer_bytes, num_buffers, address)

    @property
    def closed(self) -> bool:
        """Whether it is of no more use."""
        return self._closed or (self._group is not None and self._group.closed)

    def join(self, deadline: Deadline) -> None:
        """Return when all readers are in the group. Raises :class:`~weightsync.errors.PeerLost` if it was closed meanwhile."""
        rendezvous = self._rendezvous
        if self._group is not None or rendezvous is None:
            if self._closed:
                raise PeerLost("the group of this broadcast was closed")
            return
        group = init_custom_process_group(
            "gloo", 0, self._size, self.name, deadline, rendezvous=rendezvous, interface=self._interface
        )
        self._group = group
        if self._closed:
            group.close()
            raise PeerLost("the group of this broadcast was closed")

    def send(
        self,
        tiles: Tiles,
        frames: npt.NDArray[np.int64],
        payload: int,
        version: int,
        check: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """Broadcast all ``frames`` of ``tiles`` of the memory at ``payload``; each after its header, which readers check.

        The next ones are packed while one is on its way. ``check`` is called after each packing, and raises if that was too late.
        """
        group = self._group
        if group is None or self._closed:
            raise PeerLost("the group of this broadcast was closed")

        def pack(sequence: int) -> torch.Tensor:
            number, offset, first, last, nbytes = frames[sequence].tolist()
            buffer = self._buffers[sequence % len(self._buffers)]
            header = FrameHeader(DATA, sequence, version, number, first - offset, last - offset, nbytes)
            buffer[: HEADER.size] = np.frombuffer(header.pack(), np.uint8)
            gather_tiles(tiles, (payload,), buffer.ctypes.data + HEADER.size, first, last)
            check()
            return torch.from_numpy(buffer[: HEADER.size + nbytes])

        count, ahead = len(frames), len(self._buffers) - 1
        with ThreadPoolExecutor(1, thread_name_prefix="weightsync-collective-pack") as packer:
            packed: list[Future[torch.Tensor]] = []
            try:
                for sequence in range(count):
                    while len(packed) < min(sequence + 1 + ahead, count):
                        packed.append(packer.submit(pack, len(packed)))
                    group.broadcast([packed[sequence].result(deadline.remaining("packing a bucket"))], deadline)
            finally:
                packed.clear()  # an error in one of them would keep this frame, and so the shelf's memory

    def close(self) -> None:
        """Leave the group, so that all who are in it notice, and end a :meth:`join` that waits. Safe twice, from any thread."""
        self._closed = True
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._group is not None:
            self._group.close()
