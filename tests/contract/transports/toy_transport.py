"""A transport in one file that writes host memory and the memory of a device, which is simulated.

A real one (RDMA, say) would register both memories with its card. Here, device memory is memory of the process whose addresses are
moved out of every program's reach: code that takes one for an address of the host crashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import LOOPBACK, Network, Reader, Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.host.shared_memory import SharedMemoryPublisher, SharedMemoryReader

__all__ = ["DeviceBuffer", "Toy"]

DEVICE = 1 << 56


class DeviceBuffer:
    """Memory of the simulated device."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.zeros(nbytes, np.uint8)

    @property
    def address(self) -> int:
        return DEVICE + int(self._memory.ctypes.data)

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        self._memory[:] = data

    def read(self) -> npt.NDArray[np.uint8]:
        return self._memory.copy()


class ToyPublisher(SharedMemoryPublisher):
    """Shares its memory, under the toy's name and with its traits."""

    def __init__(self, region: PublishedRegion, key: bytes, here: Host) -> None:
        super().__init__(region, key, here)
        self.offer = msgspec.structs.replace(self.offer, scheme=Toy.name, traits=Toy.traits)


class ToyReader(SharedMemoryReader):
    """Maps the publisher's memory, and writes wherever the targets lie."""

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        within = [replace(tiles, target=np.where(tiles.target < DEVICE, tiles.target, tiles.target - DEVICE)) for tiles in groups]
        super().prepare(within, layout_digest, deadline)


class Toy(Transport):
    name = "toy"
    traits = Traits(writes=("host", "cuda"), reach="host", live_source=True)

    def reaches(self, offer: Offer, here: Host) -> bool:
        return offer.host.memory == here.memory

    def publish(self, region: PublishedRegion, key: bytes, here: Host, network: Network = LOOPBACK) -> ToyPublisher:
        return ToyPublisher(region, key, here)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:
        return ToyReader.connect(offer, key, deadline)
