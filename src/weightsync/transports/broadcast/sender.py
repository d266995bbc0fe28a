"""The publisher of every broadcast transport: gathers readers that want the same, and broadcasts to them all at once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError, StaleSource, WeightSyncError, to_wire
from weightsync.protocol.messages import Host
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.transports.base import Transport
from weightsync.transports.broadcast.group import BroadcastGroup
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

__all__ = ["BroadcastPublisher", "SendingWire"]

Int64 = npt.NDArray[np.int64]

_CLOSE_SECONDS = 10.0
_NOTHING = b""
_MEETING = EMPTY  # instead of a version: nothing is sent


class _Member:
    """One authenticated reader, and what it wants of a shelf with ``header``."""

    def __init__(self, channel: Channel, header: Header) -> None:
        self.channel = channel
        self.header = header
        self.request = _NOTHING  # a digest of all that it wants: equal for readers that can share a broadcast
        self.tiles, self.frames = CopyTable.empty(), np.empty((0, 5), np.int64)
        self.transfer: _Transfer | None = None

    def tell(self, answer: Fail | JoinEpoch) -> None:
        """Say it, unless the reader is gone: its own thread will notice."""
        with suppress(WeightSyncError, OSError):
            send_request(self.channel, answer, Deadline(ANSWER_SECONDS))


class _Transfer:
    """One broadcast, from the first reader that asks for it to its end. ``members`` is in the order in which they asked."""

    def __init__(self, request: bytes, version: int, deadline: Deadline) -> None:
        self.request, self.version = request, version
        self.members: list[_Member] = []
        self.deadline = deadline
        self.timer: threading.Timer | None = None
        self.thread: threading.Thread | None = None
        self.epoch: BroadcastGroup | None = None
        self.failed = ""

    def fail(self, why: str) -> None:
        """End it soon."""
        self.failed = self.failed or why
        if self.epoch is not None:
            self.epoch.close()


class SendingWire(ABC):
    """What a publisher broadcasts from, and through which kind of process group.

    Attributes:
        memory: Keeps the region's memory mapped, whatever happens to the region, until :meth:`close`.
    """

    memory: object = None

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
    def open(self, address: str, readers: int, deadline: Deadline) -> BroadcastGroup:
        """Open a group for so many readers."""

    def ready(self) -> Ready:
        """Answer a reader whose table of tiles was taken."""
        return Ready()

    def close(self) -> None:
        """Release the memory. Safe twice."""
        self.memory = None


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
        self._epochs: dict[bytes, tuple[BroadcastGroup, tuple[_Member, ...]]] = {}
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
        """Make the group of a reader who alone wants what it wants. Who shares gets one when all begin."""
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
        """Begin what waits for nobody any more; make the rest wait no longer than was allowed. With the lock held."""
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
        transfer.thread = threading.Thread(
            target=self._send_busily, args=(transfer, tuple(transfer.members)), name="weightsync-collective-send", daemon=True
        )
        self._running.add(transfer)
        transfer.thread.start()

    def _leave(self, member: _Member) -> None:
        """A reader's connection ended: nobody waits for it, and what it was a part of ends."""
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
        """Close the groups that it is in: they will not be complete again. With the lock held."""
        for wish, (epoch, members) in list(self._epochs.items()):
            if member in members:
                epoch.close()
                del self._epochs[wish]

    # Sending.

    def _send_busily(self, transfer: _Transfer, members: tuple[_Member, ...]) -> None:
        with self.busy():
            self._send(transfer, members)

    def _send(self, transfer: _Transfer, members: tuple[_Member, ...]) -> None:
        failure: Fail | None = None
        first, held = members[0], self._wire.memory
        frames, sent = first.frames, 0
        header: Header | None = first.header
        stamp = (0, EMPTY)

        def check() -> None:
            if header is None:
                raise PeerLost("this broadcast has ended")
            header.require_unchanged(stamp)

        try:
            if transfer.version == _MEETING:
                self._epoch(transfer, members).warm_up(first.tiles, frames, self._wire.regions, transfer.deadline)
            else:
                stamp = first.header.require(transfer.version)
                epoch, sent = self._epoch(transfer, members), len(frames)
                epoch.send(first.tiles, frames, self._wire.regions, transfer.version, check, transfer.deadline)
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
            # Told before the group goes: so readers learn why.
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

    def _epoch(self, transfer: _Transfer, members: tuple[_Member, ...]) -> BroadcastGroup:
        """The group of these readers: the one that there is, if they are in it, else a new one. Returns when all have joined."""
        with self._lock:
            epoch, before = self._epochs.pop(transfer.request, (None, ()))
        if epoch is not None and (set(before) != set(members) or epoch.closed):
            epoch.close()
            epoch = None
        if epoch is not None:
            members = before  # each has its rank already, whoever asked first this time
        if epoch is None:
            epoch = self._wire.open(self.bound, len(members), transfer.deadline)
        with self._lock:
            transfer.epoch = epoch
            if transfer.failed:
                epoch.close()
                raise PeerLost(transfer.failed)
        for rank, member in enumerate(members, 1):
            member.tell(JoinEpoch(epoch.name, rank, len(members) + 1, epoch.port, self._wire.buffer_bytes))
        epoch.join(transfer.deadline)
        with self._lock:
            self._epochs[transfer.request] = (epoch, members)
        return epoch

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        super().close()
        with self._lock:
            running, epochs = list(self._running), [epoch for epoch, _ in self._epochs.values()]
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
        for transfer in running:
            if transfer.thread is not None:
                transfer.thread.join(_CLOSE_SECONDS)
        self._wire.close()


def _within(member: _Member, seconds: float) -> Deadline:
    """Of what a reader asks for: within bounds, and after it said what it wants."""
    if not member.request:
        raise ProtocolError("a transfer was begun before anything was wanted")
    return transfer_deadline(seconds)
