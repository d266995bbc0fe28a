"""The publisher of every broadcast transport: gathers readers that want the same, and broadcasts to them all at once.

All readers request each window of a stream. If a window was not sent in time, or its broadcast broke twice, the publisher sends it
and all later windows of that version to each reader alone, so that only the reader fails that is slow or broken.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from weightsync.arrays import Int64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.errors import (
    Aborted,
    BroadcastBroken,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    WeightSyncError,
    to_wire,
)
from weightsync.protocol.messages import Host
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.transports.base import Transport
from weightsync.transports.broadcast.process_groups import ProcessGroup, StoreRendezvous
from weightsync.transports.broadcast.reader import MESSAGES, JoinEpoch, Warmup
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, Header, PublishedRegion
from weightsync.transports.net.channel import END, Channel, FrameHeader
from weightsync.transports.net.frames import wanted_tiles
from weightsync.transports.net.listening_publisher import ListenAddress, ListeningPublisher
from weightsync.transports.net.messages import (
    ANSWER_SECONDS,
    ControlMessage,
    Fail,
    Handlers,
    Ready,
    RegisterTiles,
    Start,
    TableBudget,
    send_request,
    serve_requests,
    transfer_deadline,
)

_CLOSE_SECONDS = 10.0
_GATHER_PART = 0.25
"""At most so much of the first reader's time is spent waiting for other readers."""
_SHARED_PART = 0.5
"""So much of the readers' time a window may take to several: the rest is for sending it again."""
_NOTHING = b""
_MEETING = EMPTY  # instead of a version: nothing is sent


class _Member:
    """One authenticated reader, and what it requests of a region with ``header``."""

    def __init__(self, channel: Channel, header: Header) -> None:
        self.channel = channel
        self.header = header
        self.request = _NOTHING  # a digest of all that it wants: equal for readers that can share a broadcast
        self.tiles, self.frames = CopyTable.empty(), np.empty((0, 5), np.int64)
        self.transfer: _GroupTransfer | None = None
        self.group: _Group | None = None
        self.received: tuple[bytes, int] | None = None
        """What it got last, which it does not request again."""
        self.absent = False
        """Whether it was waited for in vain since it last began a transfer."""

    def tell(self, answer: Fail | JoinEpoch) -> None:
        """Send ``answer``. If the reader is gone, its own thread notices."""
        with suppress(WeightSyncError, OSError):
            send_request(self.channel, answer, Deadline(ANSWER_SECONDS))


class _GroupTransfer:
    """One broadcast, from the first reader that asks for it to its end. ``members`` is in the order in which they asked."""

    def __init__(self, request: bytes, version: int, deadline: Deadline) -> None:
        self.request, self.version = request, version
        self.members: list[_Member] = []
        self.deadline = deadline
        self.timer: threading.Timer | None = None
        self.group: _Group | None = None
        self.failed = ""

    @property
    def key(self) -> tuple[bytes, int]:
        """What is sent."""
        return self.request, self.version

    def fail(self, why: str) -> None:
        """Make the broadcast end soon."""
        self.failed = self.failed or why
        if self.group is not None:
            self.group.close()


class BroadcastJob(NamedTuple):
    """What is broadcast: ``frames`` of ``tiles`` of the memory at ``regions``, as ``version``.

    ``request`` is equal for jobs with equal tiles. ``check`` is called before each frame, and raises if the memory has changed.
    """

    request: bytes
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
    """The sender's end of one process group, which ``members`` may join from now on at ``address`` and :attr:`port`.

    Not thread-safe, except :meth:`close`.
    """

    def __init__(self, wire: SendingWire, address: str, members: tuple[_Member, ...], deadline: Deadline) -> None:
        self.name = secrets.token_hex(16)
        self.members = members
        """In the order of their ranks, from 1 on."""
        self.packer = wire.packer()
        self._wire, self._size = wire, len(members) + 1
        self._rendezvous = StoreRendezvous(address, self._size, deadline)
        self.port = self._rendezvous.port
        self._joined: ProcessGroup | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it is of no more use."""
        return self._closed or (self._joined is not None and self._joined.closed)

    def join(self, deadline: Deadline) -> ProcessGroup:
        """Return the group when all readers are in it.

        Raises:
            DeadlineExceeded: A reader did not come in time.
            PeerLost: The group was closed meanwhile.
        """
        if self._joined is None and not self._closed:
            self._joined = self._meet(deadline)
        if self._joined is None or self._closed:
            self.close()
            raise PeerLost("the group of this broadcast was closed")
        return self._joined

    def _meet(self, deadline: Deadline) -> ProcessGroup:
        # torch's timeout starts again for each member; closing the rendezvous ends its wait.
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.close()

        timer = threading.Timer(deadline.remaining("joining a group"), give_up)
        timer.daemon = True
        timer.start()
        try:
            where = self._rendezvous.address
            return self._wire.join(0, self._size, self.name, deadline, rendezvous=self._rendezvous, interface=where)
        except PeerLost as error:
            if late.is_set():
                raise DeadlineExceeded(f"a reader did not join its group within {deadline.seconds:.3g} s") from error
            raise
        finally:
            timer.cancel()
            timer.join(_CLOSE_SECONDS)  # it refers to readers, and they to the region

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
        listen: ListenAddress,
        gather_seconds: float,
    ) -> None:
        self._region, self._layout_digest, self._sizes = region, region.layout_digest, region.sizes
        self._budget = TableBudget(sum(region.sizes))
        self._wire, self._gather_seconds = wire, gather_seconds
        self._lock = threading.RLock()
        self._members: set[_Member] = set()
        self._gathering: dict[tuple[bytes, int], _GroupTransfer] = {}
        self._running: set[_GroupTransfer] = set()
        self._threads: list[threading.Thread] = []
        self._broken: tuple[bytes, int] | None = None
        """The window whose broadcast to several readers broke last, if none succeeded since."""
        self._closing = False
        self._apart = EMPTY
        """The version whose windows go to each reader alone."""
        with OnFailure(wire.close):
            super().__init__(transport, key, local_host, listen)

    def _serve(self, channel: Channel) -> None:
        member = _Member(channel, self._region.header)
        with self._lock:
            self._members.add(member)

        def idle(handler: Callable[[_Member, Any], Ready | None]) -> Callable[[Any], Ready | None]:
            def handle(request: ControlMessage) -> Ready | None:
                if member.transfer is not None:
                    raise Aborted("a reader must not ask for anything while it is being sent to")  # ends the connection
                return handler(member, request)

            return handle

        handlers: Handlers = {RegisterTiles: idle(self._remember), Start: idle(self._start), Warmup: idle(self._warm_up)}
        try:
            serve_requests(channel, self._budget, handlers, MESSAGES)
        finally:
            self._leave(member)

    def _remember(self, member: _Member, want: RegisterTiles) -> Ready:
        with self._lock:
            member.request = _NOTHING
        tiles, counts = wanted_tiles(want, self._layout_digest, self._sizes, TILE_BYTES)
        member.tiles, member.frames = tiles, self._wire.cut(counts, tiles.rows * tiles.row_bytes)
        with self._lock:
            member.request = blake2b(want.counts + want.tiles, digest_size=16).digest()
            self._look(member.request)
        return self._wire.ready()

    # Gathering.

    def _warm_up(self, member: _Member, request: Warmup) -> None:
        """Make the group of a reader that shares its request with no other. Readers that share get a group when all begin."""
        deadline = _within(member, request.seconds)
        with self._lock:
            alone = not self._region.windows and not self._sharing(member)
            if alone:
                self._run_alone(member, _MEETING, deadline)
        if not alone:
            member.channel.send([FrameHeader(END, 0, _MEETING).pack()], Deadline(ANSWER_SECONDS))

    def _start(self, member: _Member, request: Start) -> None:
        deadline = _within(member, request.seconds)
        member.header.require(request.version)
        with self._lock:
            member.absent = False
            if request.version == self._apart:
                self._run_alone(member, request.version, deadline)
                return
            key = (member.request, request.version)
            transfer = self._gathering.get(key)
            if transfer is None:
                transfer = self._gathering[key] = _GroupTransfer(*key, deadline)
            else:
                first_or_last = min if self._region.windows else max  # a window can be sent again to readers that have time left
                transfer.deadline = first_or_last(transfer.deadline, deadline, key=lambda limit: limit.at)
            transfer.members.append(member)
            member.transfer = transfer
            self._look(member.request)

    def _sharing(self, member: _Member) -> bool:
        """Whether another reader has the same request. Call with the lock held."""
        return any(other.request == member.request for other in self._members if other is not member)

    def _run_alone(self, member: _Member, version: int, deadline: Deadline) -> None:
        transfer = member.transfer = _GroupTransfer(member.request, version, deadline)
        transfer.members.append(member)
        self._run(transfer)

    def _awaited(self, transfer: _GroupTransfer) -> list[_Member]:
        """The readers that have not begun and should be part of this transfer. A window goes to all readers."""
        idle = (member for member in self._members if member.transfer is None)
        if self._region.windows:
            return [member for member in idle if not member.absent and member.received != transfer.key]
        return [member for member in idle if member.request == transfer.request]

    def _look(self, request: bytes) -> None:
        """Begin transfers that wait for no reader any more, and limit how long the others wait. Call with the lock held."""
        for transfer in list(self._gathering.values()):
            if transfer.request != request and not self._region.windows:
                continue
            if not transfer.members or not self._awaited(transfer):
                self._begin(transfer)
            elif transfer.timer is None:
                seconds = min(self._gather_seconds, transfer.deadline.left * _GATHER_PART)
                transfer.timer = threading.Timer(seconds, self._begin_late, [transfer])
                self._begin_thread(transfer.timer)

    def _begin_late(self, transfer: _GroupTransfer) -> None:
        with self._lock:
            if self._gathering.get(transfer.key) is transfer:
                for member in self._awaited(transfer):
                    member.absent = True
                self._begin(transfer)

    def _begin(self, transfer: _GroupTransfer) -> None:
        del self._gathering[transfer.key]
        if transfer.timer is not None:
            transfer.timer.cancel()
        if transfer.members:
            self._run(transfer)

    def _run(self, transfer: _GroupTransfer) -> None:
        arguments, name = (transfer, tuple(transfer.members)), "weightsync-collective-send"
        self._running.add(transfer)
        self._begin_thread(threading.Thread(target=self._send_busily, args=arguments, name=name))

    def _begin_thread(self, thread: threading.Thread) -> None:
        """Start a thread that :meth:`close` waits for: what it refers to keeps the region mapped. Call with the lock held."""
        thread.daemon = True
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
        thread.start()

    def _leave(self, member: _Member) -> None:
        """Drop a reader whose connection ended. Transfers that it is part of end."""
        with self._lock:
            self._members.discard(member)
            transfer, member.transfer = member.transfer, None
            if transfer is not None and transfer in self._running:
                transfer.fail("another reader of this broadcast went away")
            elif transfer is not None:
                transfer.members.remove(member)
            _disband(member)  # its group cannot be complete again
            self._look(member.request)

    # Sending.

    def _send_busily(self, transfer: _GroupTransfer, members: tuple[_Member, ...]) -> None:
        with self.busy():
            self._send(transfer, members)

    def _send(self, transfer: _GroupTransfer, members: tuple[_Member, ...]) -> None:
        failure: Fail | None = None
        first, held, several = members[0], self._wire.memory, len(members) > 1
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
            deadline = transfer.deadline
            if several and self._region.windows:
                deadline = Deadline(deadline.remaining("sending a window") * _SHARED_PART)
            group = self._group(transfer, members, deadline)
            joined = group.join(deadline)
            job = BroadcastJob(transfer.request, first.tiles, first.frames, self._wire.regions, transfer.version, check)
            if transfer.version == _MEETING:
                group.packer.warm_up(joined, job, deadline)
            else:
                group.packer.send(joined, job, deadline)
                check()
        except Exception as caught:  # noqa: BLE001 - sent to the readers, which raise it
            failure = Fail(*to_wire(self._reason(transfer, caught, several)))  # the error itself would keep the region mapped
        finally:
            header = None  # a thread that hangs in a group that was aborted would keep the region mapped
        del held
        with self._lock:
            for member in members:
                member.transfer = None
                member.received = transfer.key if failure is None else None
                if failure is not None and member.group is transfer.group:
                    member.group = None  # it is closed below: a reader that begins again before that gets another group
            if failure is None:
                self._broken = None
        if failure is not None:
            # Sent before the group is closed, so that readers learn why.
            for member in members:
                member.tell(failure)
            if transfer.group is not None:
                transfer.group.close()
        else:
            end = FrameHeader(END, sent, transfer.version).pack()
            for member in members:
                with suppress(WeightSyncError, OSError):
                    member.channel.send([end], Deadline(ANSWER_SECONDS))
        with self._lock:
            self._running.discard(transfer)

    def _reason(self, transfer: _GroupTransfer, caught: Exception, several: bool) -> Exception:
        """Return the error for the readers of a broadcast that failed. If it is ``BroadcastBroken``, they may request it again.

        A window that took too long, or broke twice, does not show which reader is to blame: from then on each is sent to alone.
        """
        slow = isinstance(caught, DeadlineExceeded) and self._region.windows
        with self._lock:
            if not isinstance(caught, PeerLost) and not slow:
                return caught
            if several and self._region.windows:
                if slow or self._broken == transfer.key:
                    self._apart = transfer.version
                self._broken = transfer.key
            if several and not self._closing:
                return BroadcastBroken(transfer.failed or str(caught))
            return PeerLost(transfer.failed) if transfer.failed else caught

    def _group(self, transfer: _GroupTransfer, members: tuple[_Member, ...], deadline: Deadline) -> _Group:
        """Return the group of exactly these readers, the one that there is or a new one, and tell them to join it."""
        with self._lock:
            group = members[0].group
            if group is not None and (group.closed or set(group.members) != set(members)):
                group = None
            if group is None:
                for member in members:
                    _disband(member)
        if group is None:
            group = _Group(self._wire, self.bound, members, deadline)
        with self._lock:
            transfer.group = group
            if transfer.failed:
                group.close()
                raise PeerLost(transfer.failed)
            for member in members:
                member.group = group
        seconds = deadline.remaining("sending to readers")
        for rank, member in enumerate(group.members, 1):  # each keeps its rank, whichever asked first this time
            member.tell(JoinEpoch(group.name, rank, len(members) + 1, group.port, self._wire.buffer_bytes, seconds))
        return group

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._closing = True
        super().close()
        with self._lock:
            running, threads = list(self._running), self._threads
            gathering, self._gathering = list(self._gathering.values()), {}
            for member in self._members:
                _disband(member)
        for transfer in running:
            transfer.fail("the trainer rank stopped serving")
        for transfer in gathering:
            if transfer.timer is not None:
                transfer.timer.cancel()
        for thread in threads:
            thread.join(_CLOSE_SECONDS)
        self._wire.close()


def _disband(member: _Member) -> None:
    """Close the group that a reader is in. Call with the lock held."""
    group = member.group
    if group is not None:
        group.close()
        for other in group.members:
            other.group = None


def _within(member: _Member, seconds: float) -> Deadline:
    """Return the deadline of a reader's request, within bounds. The reader must have sent its table of tiles before."""
    if not member.request:
        raise ProtocolError("a transfer was begun before anything was wanted")
    return transfer_deadline(seconds)
