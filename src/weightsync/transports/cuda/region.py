"""Live memory of a trainer rank's GPU offered in place: the counterpart of a host region. Nothing is copied.

Where a host region's bytes are the publication, here they are the parameters themselves: they hold a version from the end of
:meth:`CudaRegion.placing` until :meth:`CudaRegion.withdraw` (or the next placing), and only then may the trainer change them.
Version and sequence lie in a page of host memory that readers map, so a reader that was too slow finds out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from weightsync.arrays import Bytes, Int64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import LayoutError, ProtocolError, TransportUnavailable
from weightsync.tensors.cuda.waiting import wait_until_idle
from weightsync.transports.cuda.driver import HANDLE_BYTES, Allocation, DeviceMemory, allocation_of, export_handle, still_allocated
from weightsync.transports.host.region import HEADER_BYTES, Header, PublishedRegion
from weightsync.transports.hostinfo import this_process

PLACING_SECONDS = 60.0
"""How long the work that is queued on a device may take before what it computes is published, where no deadline is nearer."""
_MOST_BYTES = 1 << 60
_EXPORTS_WORD = 16  # of the header page, behind what Header uses; in a cache line of its own


def export_count(page: Bytes) -> int:
    """How often the publisher of this header page has exported memory: a reader whose number is another must ask again."""
    return int(page[:HEADER_BYTES].view(np.int64)[_EXPORTS_WORD])


class Exported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader must know to map the regions. ``columns`` is little-endian ``int64[3, regions]``: allocation, offset, bytes."""

    process: str
    device: int
    count: int
    layout_digest: str
    handles: tuple[bytes, ...]
    ids: tuple[int, ...]
    """Of allocations: never used twice in the publisher's process, where a handle may be."""
    bases: tuple[int, ...]
    """Addresses in the publisher's process, which only a reader in that same process may use."""
    sizes: tuple[int, ...]
    columns: bytes

    def regions(self) -> Int64:
        """The columns, checked. Raises :class:`~weightsync.errors.ProtocolError` for a region outside its allocation."""
        if len(self.columns) % 24 or not len(self.handles) == len(self.ids) == len(self.bases) == len(self.sizes):
            raise ProtocolError("the publisher described its device memory in columns of different lengths")
        columns = np.frombuffer(self.columns, "<i8").astype(np.int64).reshape(3, -1)
        if any(not 0 <= size <= _MOST_BYTES for size in self.sizes):
            raise ProtocolError("the publisher described an allocation of an impossible size")
        number, offset, size = columns
        if columns.size and (columns.min() < 0 or number.max() >= len(self.sizes)):
            raise ProtocolError("the publisher named device memory that it did not export")
        if np.any(offset > np.array([*self.sizes, 0], np.int64)[number] - size) or any(
            len(handle) != HANDLE_BYTES for handle in self.handles
        ):
            raise ProtocolError("the publisher described a region that leaves its allocation, or a handle of the wrong length")
        return columns


class CudaRegion:
    """Regions of one GPU's memory, readable by other processes while they hold a version.

    ``addresses()`` tells where the regions (of ``sizes`` bytes, those of the layout with digest ``layout_digest``) lie *now*; it
    is asked at every placing, so that memory that was freed, moved or put on another allocation since is exported again and
    never read stale. After :meth:`export`, processes of this machine may map them: from then on a placing raises
    :class:`~weightsync.errors.TransportUnavailable` for memory that CUDA IPC cannot share, and
    :class:`~weightsync.errors.StaleSource` for memory that is not allocated. ``windows`` is that of
    :class:`~weightsync.transports.host.region.PublishedRegion`.

    ::

        with region.placing(7):
            digests = ...           # readers find no version yet
        ...                         # the round; the trainer stands still
        region.withdraw()            # now it may step
    """

    def __init__(
        self,
        sizes: Sequence[int],
        layout_digest: str,
        addresses: Callable[[], Sequence[int]],
        device: int,
        *,
        windows: bool = False,
    ) -> None:
        self.sizes = tuple(sizes)
        self.layout_digest, self.windows = layout_digest, windows
        self.device = device
        self._addresses = addresses
        self._cell = PublishedRegion(0, layout_digest)
        self._found: tuple[tuple[Allocation, ...], tuple[int, ...]] = ((), ())
        self._exports = False
        self._exported: Exported | None = None
        self.addresses: tuple[int, ...] = ()
        """Where the regions lay at the last placing."""
        with OnFailure(self._cell.close):
            self._look()

    @property
    def fd(self) -> int | None:
        """The header page's file descriptor, owned by the region."""
        return self._cell.fd

    @property
    def page(self) -> Bytes:
        """The header page."""
        return self._cell.memory

    @property
    def header(self) -> Header:
        """What readers look at to know the version."""
        return self._cell.header

    @property
    def exported(self) -> Exported:
        """What a reader must know to map the regions. Raises TransportUnavailable where they are not to be mapped."""
        if self._exported is None:
            raise TransportUnavailable("this rank's device memory is not shared by CUDA IPC")
        return self._exported

    @property
    def version(self) -> int:
        """The version that readers find, or :data:`~weightsync.transports.host.region.EMPTY`."""
        return self._cell.version

    def _look(self) -> None:
        """Look where the regions are."""
        addresses = tuple(self._addresses())
        if len(addresses) != len(self.sizes):
            raise LayoutError(f"{len(addresses)} addresses for {len(self.sizes)} regions of device memory")
        if self._exports:
            self._exported = self._exported_at(addresses)
        self.addresses = addresses

    def export(self) -> None:
        """Let processes of this machine map the regions, from now on. Raises as a placing does then."""
        self._exports = True
        try:
            self._look()
        except BaseException:
            self._exports = False
            raise

    def _exported_at(self, addresses: tuple[int, ...]) -> Exported:
        """The same as before, or new handles if the regions are anywhere else."""
        allocations, where = self._found
        if self._exported is not None and addresses == where and still_allocated(allocations, self.device):
            return self._exported
        held: list[Allocation] = []
        number = np.zeros(len(addresses), np.int64)
        for index in np.argsort(np.array(addresses, np.int64), kind="stable").tolist():
            address, size = addresses[index], self.sizes[index]
            if not held or address >= held[-1].end:
                held.append(allocation_of(address, self.device))
                if not held[-1].exportable:
                    export_handle(held[-1])  # raises: an expandable segment may end in the middle of a region
            if address + size > held[-1].end:
                raise LayoutError(f"a region of {size:,} bytes at {address:#x} reaches past its allocation")
            number[index] = len(held) - 1
        found = (tuple(held), addresses)
        if self._exported is not None and found == self._found:
            return self._exported
        handles = tuple(export_handle(item) for item in held)
        offset = np.array(addresses, np.int64) - np.array([*(item.base for item in held), 0], np.int64)[number]
        words = self.page.view(np.int64)
        exported = Exported(
            process=this_process(),
            device=self.device,
            count=int(words[_EXPORTS_WORD]) + 1,
            layout_digest=self.layout_digest,
            handles=handles,
            ids=tuple(item.buffer_id for item in held),
            bases=tuple(item.base for item in held),
            sizes=tuple(item.nbytes for item in held),
            columns=np.stack([number, offset, np.array(self.sizes, np.int64)]).astype("<i8").tobytes(),
        )
        self._found = found
        words[_EXPORTS_WORD] = exported.count
        return exported

    @contextmanager
    def placing(self, number: int) -> Iterator[None]:
        """Publish the memory as it is after this block as version ``number``; within it, readers find no version.

        Waits at its end for all work of this process on the device, at most a minute, so that readers see what was computed. An
        exception leaves nothing published. Raises :class:`~weightsync.errors.VersionError` as a host region does,
        :class:`~weightsync.errors.DeadlineExceeded`, and what the class says of memory.
        """
        with self._cell.placing(number):
            self._look()
            yield
            wait_until_idle(self.device, Deadline(PLACING_SECONDS), f"what is queued on CUDA device {self.device} before a version")

    def withdraw(self) -> None:
        """Say that the memory is about to change: a transfer that still runs ends with StaleSource at its reader."""
        self._cell.header.invalidate()

    def close(self) -> None:
        """Withdraw and let go of the page. The device memory stays the publisher's. Safe twice."""
        self._cell.close()


class OwnMemory(DeviceMemory):
    """Memory of a device for a region."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, ``uint8[nbytes]``. Not to be used after :meth:`free`."""
        return torch.as_tensor(self, device=self.device)


class OwnCudaRegion(CudaRegion):
    """One region of ``nbytes``, in memory of the CUDA ``device`` that it allocates itself and frees when it is closed.

    Raises:
        TransportUnavailable: The device has not enough memory free.
    """

    def __init__(self, nbytes: int, layout_digest: str, device: torch.device) -> None:
        self._memory = OwnMemory(nbytes, device)
        with OnFailure(self._memory.free):
            super().__init__((nbytes,), layout_digest, lambda: (self._memory.address,), device.index)

    @property
    def memory(self) -> torch.Tensor:
        """The memory, ``uint8[nbytes]``. Not to be used after :meth:`close`."""
        return self._memory.tensor

    def close(self) -> None:
        """Withdraw, and free the memory. Safe twice. A reader that has mapped it keeps it."""
        super().close()
        self._memory.free()
