"""Transport ``cuda_ipc``: the reader's GPU maps the publisher's device memory and reads it itself, in one launch.

The connection is that of shared memory: an abstract socket, both ends proved. Over it the publisher sends the descriptor of its
header page (version and sequence) and, on request, what it exports (:class:`~weightsync.transports.cuda.region.Exported`).
Handles let their holder write too, so they are given to authenticated processes of the same user only.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer, Traits, decoding
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.cuda.waiting import wait_for_event, wait_until_idle
from weightsync.transports.base import LOOPBACK, Completion, Network, Reader, Transport
from weightsync.transports.cuda.driver import close_handle, driver_problem, open_handle, reach_device
from weightsync.transports.cuda.region import CudaRegion, Exported, export_count
from weightsync.transports.host.mapped import HeaderReader
from weightsync.transports.host.memory import map_read_only
from weightsync.transports.host.region import HEADER_BYTES, Header, PublishedRegion
from weightsync.transports.host.unix_socket import LocalPublisher, open_local
from weightsync.transports.hostinfo import this_process
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import HELLO_SECONDS

_PREFIX = "weightsync-gpu-"
_ASK = b"?"
_LENGTH = struct.Struct("<Q")
_MOST_FACTS = 64 << 20  # a million regions


class CudaIpcPublisher(LocalPublisher):
    """Tells authenticated readers of the same user where to find a :class:`~weightsync.transports.cuda.region.CudaRegion`."""

    def __init__(self, region: CudaRegion, key: bytes, local_host: Host) -> None:
        region.export()
        self._region = region
        super().__init__(CudaIpc, "CUDA IPC", _PREFIX, lambda: region.fd, key, local_host)

    def _facts(self) -> bytes:
        return _ASK

    def _stay(self, channel: Channel) -> None:
        while channel.next_byte() == _ASK:
            facts = msgspec.msgpack.encode(self._region.exported)
            channel.send([_LENGTH.pack(len(facts)), facts], Deadline(HELLO_SECONDS))


class CudaIpcReader(HeaderReader):
    """One reader's mapping of one publisher's device memory: a :class:`~weightsync.transports.base.Reader`.

    Targets are addresses in the memory of ``device`` (or in memory that it can reach). To fill one GPU from several publishers in
    one launch, give their readers to :class:`CombinedReader`.
    """

    stream_ordered = True

    def __init__(self, channel: Channel, device: int, deadline: Deadline) -> None:
        self._channel, self._peer = channel, channel.peer
        self.device = device
        _, fd = channel.receive_descriptor(len(_ASK), deadline)
        try:
            self._page = map_read_only(fd, HEADER_BYTES)
        finally:
            os.close(fd)
        self._header = Header(self._page)
        self._header.check(0)
        self.groups: tuple[CopyTable, ...] = ()
        self._alone: CombinedReader | None = None
        self._running: torch.cuda.Event | None = None
        self._opened: dict[tuple[bytes, int], int] = {}  # by handle and allocation: a handle's bytes may come again for another
        self._facts: Exported
        self.exports = 0
        """Number of the publisher's export that :attr:`addresses` belong to. Differs from the publisher's until all is mapped."""
        self.addresses: tuple[int, ...] = ()
        """Where this process sees each of the publisher's regions; 0 for those of which nothing is wanted."""
        self._sizes: tuple[int, ...] = ()
        self._layout_digest = ""
        with OnFailure(self.close):
            self._ask(deadline)

    def _ask(self, deadline: Deadline) -> None:
        """Ask what the publisher exports."""
        self._channel.send([_ASK], deadline)
        (length,) = _LENGTH.unpack(self._channel.receive(_LENGTH.size, deadline))
        if length > _MOST_FACTS:
            raise ProtocolError(f"{self._channel.peer} announced {length:,} bytes about its device memory")
        with decoding(f"{self._channel.peer} described its device memory wrongly"):
            facts = msgspec.msgpack.decode(self._channel.receive(length, deadline), type=Exported)
        _, _, size = facts.regions()
        if facts.process == this_process():
            reach_device(facts.device, self.device)
        self._sizes = tuple(size.tolist())
        self._layout_digest = facts.layout_digest
        self._facts = facts

    def _open(self, deadline: Deadline) -> None:
        """Map the allocations of which something is wanted, and let go of those that are gone.

        Opening a handle costs 50 microseconds (2 MiB) and more, in several threads too, and there may be ten thousand.
        """
        facts = self._facts
        number, offset, _ = facts.regions()
        wanted = np.zeros(len(number), np.bool_)
        for tiles in self.groups:
            wanted[tiles.region] = True
        bases = np.zeros(len(facts.handles) + 1, np.int64)
        exported = list(zip(facts.handles, facts.ids, strict=True))
        for gone in self._opened.keys() - set(exported):  # first, lest an equal handle of another allocation finds their mapping
            close_handle(self._opened.pop(gone), self.device)
        for index in np.unique(number[wanted]).tolist():
            bases[index] = facts.bases[index] if facts.process == this_process() else self._opened_at(exported[index])
            self._check(deadline, "mapping device memory")
        self.addresses = tuple(np.where(wanted, bases[number] + offset, 0).tolist())
        self.exports = facts.count

    def _opened_at(self, exported: tuple[bytes, int]) -> int:
        if exported not in self._opened:
            self._opened[exported] = open_handle(exported[0], self.device)
        return self._opened[exported]

    def _publisher_lives(self) -> bool:
        return self._channel.peer_lives()

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._aborted, self._stamp, self.groups = False, None, ()
        self._check(deadline, "preparing")
        self.finish(deadline)  # a read that failed may still run, on memory that is unmapped below
        self._check_layout(layout_digest)
        for tiles in groups:
            check_tiles(tiles, self._sizes)
        self.groups = tuple(groups)
        self._open(deadline)

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`. Waits for work that this process has on the device."""
        self._aborted, self._stamp = False, None
        self._check(deadline, f"beginning version {version}")
        stamp = self._header.require(version)
        if self.exports != export_count(self._page):
            self.finish(deadline)
            self._ask(deadline)
            for tiles in self.groups:
                check_tiles(tiles, self._sizes)
            self._open(deadline)
        # Readers of the targets must be done before they change.
        wait_until_idle(self.device, deadline, f"what this engine rank has queued on its device before version {version}")
        self._stamp = stamp

    def submit(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> Completion:
        """See :meth:`weightsync.transports.base.Reader.submit`."""
        if self._alone is None:
            self._alone = CombinedReader([self])
        return self._alone.submit(group, deadline, digests)

    def launched(self, event: torch.cuda.Event) -> None:
        """Remember what marks the end of work on the mapping: only after it may anything be unmapped."""
        self._running = event

    def finish(self, deadline: Deadline) -> None:
        """Wait for what was launched last."""
        if self._running is not None:
            wait_for_event(self._running, deadline, f"reading device memory of {self._channel.peer}")
            self._running = None

    def require_unchanged(self, deadline: Deadline) -> None:
        """Raise what :meth:`read` may raise unless the publisher lives and has held this version since :meth:`begin`."""
        stamp = self._started()
        self._check(deadline, "reading")
        self._header.require_unchanged(stamp)

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        self.finish(deadline)
        self.require_unchanged(deadline)
        self._stamp = None

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`. A launch that runs is waited for, but then reported as aborted."""
        self._aborted = True

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`. Memory that a launch still reads stays mapped with the process."""
        if self._closed:
            return
        self._closed = True
        self._alone = None
        self._channel.close()
        opened, self._opened = self._opened, {}
        if self._running is None or self._running.query():  # type: ignore[no-untyped-call]
            for address in opened.values():
                close_handle(address, self.device)


class _Launched:
    """A launch whose end ``event`` marks: it reads the memory of ``readers``."""

    def __init__(self, event: torch.cuda.Event, readers: tuple[CudaIpcReader, ...]) -> None:
        self._event, self._readers = event, readers

    def wait(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Completion.wait`: raises unless every publisher lives and holds its version."""
        wait_for_event(self._event, deadline, "reading device memory")
        for reader in self._readers:
            reader.require_unchanged(deadline)


class CombinedReader(Reader):
    """Several publishers' readers as one: all of a group's tiles in a single launch, straight to where they belong.

    The table is built here, and again when a publisher has exported its memory again. Raises
    :class:`~weightsync.errors.ProtocolError` for readers that were prepared with other numbers of groups, or for other devices.
    """

    stream_ordered = True

    def __init__(self, readers: Sequence[CudaIpcReader]) -> None:
        self._readers = tuple(readers)
        self._made_of: tuple[object, ...] = ()
        self._copy = self._build()

    def _build(self) -> TileCopy:
        """The copy of all groups as they are mapped now."""
        made_of = tuple((reader.groups, reader.addresses) for reader in self._readers)
        if made_of != self._made_of:
            counts = {len(reader.groups) for reader in self._readers}
            devices = {reader.device for reader in self._readers}
            if len(counts) != 1 or len(devices) != 1:
                raise ProtocolError("readers that are combined need the same groups and the same device")
            groups = [[(reader.groups[index], reader.addresses) for reader in self._readers] for index in range(counts.pop())]
            device = torch.device("cuda", devices.pop())
            with torch.cuda.device(device):
                self._copy, self._made_of = TileCopy(groups, device), made_of
        return self._copy

    @property
    def table_bytes(self) -> int:
        """See :attr:`weightsync.transports.base.Reader.table_bytes`."""
        return self._copy.table_bytes

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """Raise: each reader is prepared by itself, with what it has to read."""
        raise ProtocolError("prepare each reader before they are combined")

    def require(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.require`."""
        for reader in self._readers:
            reader.require(version, deadline)

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        for reader in self._readers:
            reader.begin(version, deadline)

    def submit(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> Completion:
        """See :meth:`weightsync.transports.base.Reader.submit`. Launches on the device's current stream."""
        if digests is not None:
            raise ProtocolError("cuda_ipc takes no digests while it reads: use weightsync.tensors.cuda.digest.LayoutDigest")
        for reader in self._readers:
            reader.require_unchanged(deadline)
            self._check_group(group, len(reader.groups))
        copy = self._build()
        copy.launch(group, group + 1)
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(copy.device))
        for reader in self._readers:
            reader.launched(launched)
        return _Launched(launched, self._readers)

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        for reader in self._readers:
            reader.end(deadline)

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        for reader in self._readers:
            reader.abort()

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        for reader in self._readers:
            reader.close()


class CudaIpc(Transport):
    """The transport ``cuda_ipc``. ``device`` is the reader's own CUDA device; by default the current one when it connects."""

    name = "cuda_ipc"
    traits = Traits(reads=("cuda",), writes=("cuda",), reach="host", digests="after", live_source=True)

    def __init__(self, device: int | None = None) -> None:
        self._device = device

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        if sys.platform != "linux":
            return "CUDA IPC needs Linux"
        if not torch.cuda.is_available():
            return "CUDA IPC needs a CUDA device and a build of torch for it"
        return driver_problem()

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return offer.host.memory == local_host.memory and offer.address.startswith(_PREFIX) and self.unavailable() is None

    def publish(
        self, region: PublishedRegion | CudaRegion, key: bytes, local_host: Host, network: Network = LOOPBACK
    ) -> CudaIpcPublisher:
        """See :class:`weightsync.transports.base.Transport`. Only memory of a GPU can be served: a CudaRegion."""
        if not isinstance(region, CudaRegion):
            raise TransportUnavailable("CUDA IPC shares memory of a GPU in place, and this region lies in host memory")
        return CudaIpcPublisher(region, key, local_host)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> CudaIpcReader:
        """See :class:`weightsync.transports.base.Transport`."""
        device = torch.cuda.current_device() if self._device is None else self._device
        return open_local(_PREFIX, offer, key, deadline, lambda channel, deadline: CudaIpcReader(channel, device, deadline))

    def combine(self, readers: Sequence[Reader]) -> Reader | None:
        """See :class:`weightsync.transports.base.Transport`: one launch for all."""
        return CombinedReader([reader for reader in readers if isinstance(reader, CudaIpcReader)])
