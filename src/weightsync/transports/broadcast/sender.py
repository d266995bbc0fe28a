"""The publisher of every broadcast transport: gathers readers that want the same, and broadcasts to them all at once."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError, StaleSource, WeightSyncError, to_wire
from weightsync.protocol.messages import Host
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.transports.base import Transport
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, Header, PublishedRegion
from weightsync.transports.net.channel import END, Channel, FrameHeader
from weightsync.transports.net.requests import (
    ANSWER_SECONDS,
    IDLE_SECONDS,
    Fail,
    JoinEpoch,
    Ready,
    RegisterTiles,
    Start,
    TableBudget,
    Warmup,
    next_request,
    send_request,
    transfer_deadline,
)
from weightsync.transports.tcp.sender import wanted_tiles
from weightsync.transports.tcp.transport import ListeningPublisher, tune

__all__ = ["BroadcastJob", "BroadcastPublisher", "Packer", "SendingWire"]

Int64 = npt.NDArray[np.int64]

_CLOSE_SECONDS = 10.0
_NOTHING = b""
_MEETING = EMPTY  # instead of a version: nothing is sent


class _Member:
    """One authenticated reader, and what it requests of a region with ``header``."""

    def __init__(self, channel: Channel, header: Header) -> None:
        self.channel = channel
        self.header = header
        self.request = _NOTHING  # a digest of all that it wants: equal for readers that can share a broadcast
        self.tiles, self.frames = CopyTable.empty(), np.empty((0, 5), np.int64)
        self.transfer: _Transfer | None = None

    def tell(self, answer: Fail | JoinEpoch) -> None:
        """Send ``answer``. If the reader is gone, its own thread notices."""
        with suppress(WeightSyncError, OSError):
            send_request(self.channel, answer, Deadline(ANSWER_SECONDS))


class _Transfer:
    """One broadcast, from the first reader that asks for it to its end. ``members`` is in the order in which they asked."""

    def __init__(self, request: bytes, version: int, deadline: Deadline) -> None:
        self.request, self.version = request, version
        self.members: list[_Member] = []
        self.deadline = deadline
        self.timer: threading.Timer | None = None
        self.epoch: _Group | None = None
        self.failed = ""

    def fail(self, why: str) -> None:
        """Make the broadcast end soon."""
        self.failed = self.failed or why
        if self.epoch is not None:
            self.epoch.close()


class BroadcastJob(NamedTuple):
    """What is broadcast: ``frames`` of ``tiles`` of the memory at ``regions``, as ``version``.

    ``check`` is called before each frame, and raises if the memory has changed.
    """

    tiles: CopyTable
    frames: Int64
    regions: Sequence[int]
    version: int
    check: Callable[[], None]


class Packer(ABC):
    """The buffers of one group. Used by one thread."""

    @abstractmethod
    def send(self, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:
        """Broadcast all frames, each after its header, which readers check. Packs the next ones while one is on its way."""

    def warm_up(self, group: ProcessGroup, job: BroadcastJob, deadline: Deadline) -> None:  # noqa: B027 - only a wire that needs it
        """Do now, with those who joined, what the first :meth:`send` of the same would have to do first."""


class SendingWire(ABC):
    """What a publisher broadcasts from, and through which kind of process group.

    Attributes:
        memory: Keeps the region's memory mapped, whatever happens to the region, until :meth:`close`.
        join: :func:`~weightsync.transports.broadcast.process_groups.init_custom_process_group` of the wire's backend.
    """

    memory: object = None
    join: Callable[..., ProcessGroup]

    @property
    @abstractmethod
    def regions(self) -> Sequence[int]:
        """The addresses of the regions as they are now."""

    @cached_property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """The size of a buffer: the same for all readers, from the first one on."""

    @abstractmethod
    def cut(self, counts: Int64, sizes: Int64) -> Int64:
        """Cut tiles of ``sizes`` bytes into frames; ``counts`` says how many tiles each group has."""

    @abstractmethod
    def packer(self) -> Packer:
        """Make the buffers of one group."""

    def ready(self) -> Ready:
        """Answer a reader whose table of tiles was taken."""
        return Ready()

    def close(self) -> None:
        """Release the memory. Safe twice."""
        self.memory = None


class _Group:
    """The sender's end of one process group, which ``readers`` may join from now on at ``address`` and :attr:`port`.

    Not thread-safe, except :meth:`close`.
    """

    def __init__(self, wire: SendingWire, address: str, readers: int, deadline: Deadline) -> None:
        self.name = secrets.token_hex(16)
        self.packer = wire.packer()
        self._wire, self._size = wire, readers + 1
        self._rendezvous = StoreRendezvous(address, self._size, deadline)
        self.port = self._rendezvous.port
        self._joined: ProcessGroup | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it is of no more use."""
        return self._closed or (self._joined is not None and self._joined.closed)

    def join(self, deadline: Deadline) -> ProcessGroup:
        """Return the group when all readers are in it. Raises :class:`~weightsync.errors.PeerLost` if it was closed meanwhile."""
        if self._joined is None and not self._closed:
            where = self._rendezvous.address
            self._joined = self._wire.join(0, self._size, self.name, deadline, rendezvous=self._rendezvous, interface=where)
        if self._joined is None or self._closed:
            self.close()
            raise PeerLost("the group of this broadcast was closed")
        return self._joined

    def close(self) -> None:
        """Leave the group, so that all who are in it notice, and end a :meth:`join` that waits. Safe twice, from any thread."""
        self._closed = True
        self._rendezvous.close()
        if self._joined is not None:
            self._joined.close()


class BroadcastPublisher(ListeningPublisher):
    """Publishes one region: a thread for each reader's connection, and one for each broadcast that runs.

    Holds the buffers of one group of readers after the other. Where they lie, and how a group broadcasts, is up to ``wire``, which
    is closed with the publisher.
    """

    def __init__(
        self,
        transport: Transport,
        region: PublishedRegion | CudaRegion,
        wire: SendingWire,
        key: bytes,
        local_host: Host,
        where: tuple[str, int, str | None],
        gather_seconds: float,
    ) -> None:
        self._region, self._layout_digest, self._sizes = region, region.layout_digest, region.sizes
        self._budget = TableBudget(sum(region.sizes))
        self._wire, self._gather_seconds = wire, gather_seconds
        self._lock = threading.RLock()
        self._members: set[_Member] = set()
        self._gathering: dict[tuple[bytes, int], _Transfer] = {}
        self._running: set[_Transfer] = set()
        self._threads: list[threading.Thread] = []
        self._epochs: dict[bytes, tuple[_Group, tuple[_Member, ...]]] = {}
        try:
            super().__init__(transport, key, local_host, *where)
        except BaseException:
            wire.close()
            raise

    def _serve(self, channel: Channel) -> None:
        tune(channel.socket)
        member = _Member(channel, self._region.header)
        with self._lock:
            self._members.add(member)
        try:
            while True:
                request = next_request(channel, self._budget, Deadline(IDLE_SECONDS))
                if member.transfer is not None:
                    raise ProtocolError("a reader must not ask for anything while it is being sent to")
                try:
                    if isinstance(request, RegisterTiles):
                        self._remember(member, request)
                        send_request(channel, self._wire.ready(), Deadline(ANSWER_SECONDS))
                    elif isinstance(request, Start):
                        self._start(member, request)
                    elif isinstance(request, Warmup):
                        self._warm_up(member, request)
                    else:
                        raise ProtocolError(f"a reader does not say {type(request).__name__}")
                except (StaleSource, ProtocolError) as error:
                    send_request(channel, Fail(*to_wire(error)), Deadline(ANSWER_SECONDS))
        finally:
            self._budget.leave(channel)
            self._leave(member)

    def _remember(self, member: _Member, want: RegisterTiles) -> None:
        with self._lock:
            member.request = _NOTHING
            self._forget(member)
        tiles, counts = wanted_tiles(want, self._layout_digest, self._sizes, TILE_BYTES)
        member.tiles, member.frames = tiles, self._wire.cut(counts, tiles.rows * tiles.row_bytes)
        with self._lock:
            member.request = blake2b(want.counts + want.tiles, digest_size=16).digest()
            self._look(member.request)

    # Gathering.

    def _warm_up(self, member: _Member, request: Warmup) -> None:
        """Make the group of a reader that shares its request with no other. Readers that share get a group when all begin."""
        deadline = _within(member, request.seconds)
        with self._lock:
            alone = all(one is member or one.request != member.request for one in self._members)
            if alone:
                transfer = member.transfer = _Transfer(member.request, _MEETING, deadline)
                transfer.members.append(member)
                self._run(transfer)
        if not alone:
            member.channel.send([FrameHeader(END, 0, _MEETING).pack()], Deadline(ANSWER_SECONDS))

    def _start(self, member: _Member, request: Start) -> None:
        deadline = _within(member, request.seconds)
        member.header.require(request.version)
        with self._lock:
            key = (member.request, request.version)
            transfer = self._gathering.get(key)
            if transfer is None:
                transfer = self._gathering[key] = _Transfer(*key, deadline)
            elif deadline.at > transfer.deadline.at:
                transfer.deadline = deadline
            transfer.members.append(member)
            member.transfer = transfer
            self._look(member.request)

    def _look(self, request: bytes) -> None:
        """Begin transfers that wait for no reader any more, and limit how long the others wait. Call with the lock held."""
        waiting = any(member.request == request and member.transfer is None for member in self._members)
        for key, transfer in list(self._gathering.items()):
            if key[0] != request:
                continue
            if not waiting or not transfer.members:
                self._begin(transfer)
            elif transfer.timer is None:
                transfer.timer = threading.Timer(self._gather_seconds, self._begin_late, [transfer])
                transfer.timer.daemon = True
                transfer.timer.start()

    def _begin_late(self, transfer: _Transfer) -> None:
        with self._lock:
            if self._gathering.get((transfer.request, transfer.version)) is transfer:
                self._begin(transfer)

    def _begin(self, transfer: _Transfer) -> None:
        del self._gathering[transfer.request, transfer.version]
        if transfer.timer is not None:
            transfer.timer.cancel()
        if transfer.members:
            self._run(transfer)

    def _run(self, transfer: _Transfer) -> None:
        thread = threading.Thread(
            target=self._send_busily, args=(transfer, tuple(transfer.members)), name="weightsync-collective-send", daemon=True
        )
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
        self._running.add(transfer)
        thread.start()

    def _leave(self, member: _Member) -> None:
        """Forget a reader whose connection ended. Transfers that it is part of end."""
        with self._lock:
            self._members.discard(member)
            transfer, member.transfer = member.transfer, None
            self._forget(member)
            if transfer is not None and transfer in self._running:
                transfer.fail("another reader of this broadcast went away")
            elif transfer is not None:
                transfer.members.remove(member)
            self._look(member.request)

    def _forget(self, member: _Member) -> None:
        """Close the groups of a reader that is gone: they will not be complete again. Call with the lock held."""
        for request, (epoch, members) in list(self._epochs.items()):
            if member in members:
                epoch.close()
                del self._epochs[request]

    # Sending.

    def _send_busily(self, transfer: _Transfer, members: tuple[_Member, ...]) -> None:
        with self.busy():
            self._send(transfer, members)

    def _send(self, transfer: _Transfer, members: tuple[_Member, ...]) -> None:
        failure: Fail | None = None
        first, held = members[0], self._wire.memory
        sent = 0
        header: Header | None = first.header
        stamp = (0, EMPTY)

        def check() -> None:
            if header is None:
                raise PeerLost("this broadcast has ended")
            header.require_unchanged(stamp)

        try:
            if transfer.version != _MEETING:
                stamp, sent = first.header.require(transfer.version), len(first.frames)
            group, packer = self._epoch(transfer, members)
            job = BroadcastJob(first.tiles, first.frames, self._wire.regions, transfer.version, check)
            if transfer.version == _MEETING:
                packer.warm_up(group, job, transfer.deadline)
            else:
                packer.send(group, job, transfer.deadline)
                check()
        except Exception as caught:  # noqa: BLE001 - sent to the readers, which raise it
            why = isinstance(caught, PeerLost) and transfer.failed
            failure = Fail(*to_wire(PeerLost(why) if why else caught))  # the error itself would keep the region mapped
        finally:
            header = None  # a thread that hangs in a group that was aborted would keep the region mapped
        del held
        with self._lock:
            for member in members:
                member.transfer = None
        if failure is not None:
            # Sent before the group is closed, so that readers learn why.
            for member in members:
                member.tell(failure)
            if transfer.epoch is not None:
                transfer.epoch.close()
        else:
            end = FrameHeader(END, sent, transfer.version).pack()
            for member in members:
                with suppress(WeightSyncError, OSError):
                    member.channel.send([end], Deadline(ANSWER_SECONDS))
        with self._lock:
            self._running.discard(transfer)

    def _epoch(self, transfer: _Transfer, members: tuple[_Member, ...]) -> tuple[ProcessGroup, Packer]:
        """Return the group of these readers, the one that there is or a new one, and its buffers, when all have joined."""
        with self._lock:
            epoch, before = self._epochs.pop(transfer.request, (None, ()))
        if epoch is not None and (set(before) != set(members) or epoch.closed):
            epoch.close()
            epoch = None
        if epoch is not None:
            members = before  # each has its rank already, whichever asked first this time
        if epoch is None:
            epoch = _Group(self._wire, self.bound, len(members), transfer.deadline)
        with self._lock:
            transfer.epoch = epoch
            if transfer.failed:
                epoch.close()
                raise PeerLost(transfer.failed)
        for rank, member in enumerate(members, 1):
            member.tell(JoinEpoch(epoch.name, rank, len(members) + 1, epoch.port, self._wire.buffer_bytes))
        group = epoch.join(transfer.deadline)
        with self._lock:
            self._epochs[transfer.request] = (epoch, members)
        return group, epoch.packer

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        super().close()
        with self._lock:
            running, threads, epochs = list(self._running), self._threads, [epoch for epoch, _ in self._epochs.values()]
            gathering, self._gathering = list(self._gathering.values()), {}
            self._epochs = {}
        for transfer in running:
            transfer.fail("the trainer rank stopped serving")
        for epoch in epochs:
            epoch.close()
        for transfer in gathering:
            if transfer.timer is not None:
                transfer.timer.cancel()
                transfer.timer.join(_CLOSE_SECONDS)
        for thread in threads:
            thread.join(_CLOSE_SECONDS)
        self._wire.close()


def _within(member: _Member, seconds: float) -> Deadline:
    """Return the deadline of a reader's request, within bounds. The reader must have sent its table of tiles before."""
    if not member.request:
        raise ProtocolError("a transfer was begun before anything was wanted")
    return transfer_deadline(seconds)
