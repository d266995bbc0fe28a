"""The sender's end of one process group: a few readers, the same buffers, as many broadcasts as come before its members change."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost
from weightsync.tensors.copies import gather_tiles
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous, init_custom_process_group
from weightsync.transports.net.channel import DATA, HEADER, FrameHeader

__all__ = ["BroadcastGroup", "HostBroadcastGroup"]


class BroadcastGroup(ABC):
    """A group that ``readers`` may join from now on, at ``address`` and :attr:`port`; used by one thread, but for :meth:`close`."""

    def __init__(self, address: str, readers: int, deadline: Deadline) -> None:
        self.name = secrets.token_hex(16)
        self._rendezvous: StoreRendezvous | None = StoreRendezvous(address, readers + 1, deadline)
        self.port = self._rendezvous.port
        self._size = readers + 1
        self._group: ProcessGroup | None = None
        self._closed = False

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
        group = self._enter(rendezvous, deadline)
        self._group = group
        if self._closed:
            group.close()
            raise PeerLost("the group of this broadcast was closed")

    def joined(self) -> ProcessGroup:
        """The group. Raises :class:`~weightsync.errors.PeerLost` if it was closed."""
        group = self._group
        if group is None or self._closed:
            raise PeerLost("the group of this broadcast was closed")
        return group

    @abstractmethod
    def warm_up(self, tiles: CopyTable, frames: npt.NDArray[np.int64], regions: Sequence[int], deadline: Deadline) -> None:
        """Do now, with those who joined, what the first :meth:`send` of the same would have to do first."""

    @abstractmethod
    def _enter(self, rendezvous: StoreRendezvous, deadline: Deadline) -> ProcessGroup:
        """Rank 0 of the group."""

    @abstractmethod
    def send(
        self,
        tiles: CopyTable,
        frames: npt.NDArray[np.int64],
        regions: Sequence[int],
        version: int,
        check: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """Broadcast all ``frames`` of ``tiles`` of the memory at ``regions``; each after its header, which readers check.

        The next ones are packed while one is on its way. ``check`` is called again and again, and raises if that was too late.
        """

    def close(self) -> None:
        """Leave the group, so that all who are in it notice, and end a :meth:`join` that waits. Safe twice, from any thread."""
        self._closed = True
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._group is not None:
            self._group.close()


class HostBroadcastGroup(BroadcastGroup):
    """From host memory, over gloo. Allocates the buffers."""

    def __init__(self, address: str, readers: int, buffer_bytes: int, num_buffers: int, deadline: Deadline) -> None:
        super().__init__(address, readers, deadline)
        self._interface = address
        self._buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(num_buffers)]

    def _enter(self, rendezvous: StoreRendezvous, deadline: Deadline) -> ProcessGroup:
        return init_custom_process_group(
            "gloo", 0, self._size, self.name, deadline, rendezvous=rendezvous, interface=self._interface
        )

    def warm_up(self, tiles: CopyTable, frames: npt.NDArray[np.int64], regions: Sequence[int], deadline: Deadline) -> None:
        """See :meth:`BroadcastGroup.warm_up`. Who has joined is connected."""

    def send(
        self,
        tiles: CopyTable,
        frames: npt.NDArray[np.int64],
        regions: Sequence[int],
        version: int,
        check: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """See :meth:`BroadcastGroup.send`."""
        group, addresses = self.joined(), tuple(regions)

        def pack(sequence: int) -> torch.Tensor:
            number, offset, first, last, nbytes = frames[sequence].tolist()
            buffer = self._buffers[sequence % len(self._buffers)]
            header = FrameHeader(DATA, sequence, version, number, first - offset, last - offset, nbytes)
            buffer[: HEADER.size] = np.frombuffer(header.pack(), np.uint8)
            gather_tiles(tiles, addresses, buffer.ctypes.data + HEADER.size, first, last)
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
