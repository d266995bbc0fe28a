"""Transport ``tcp``: the publisher sends the requested tiles over one connection. IPv4 and IPv6.

Both ends prove themselves (:mod:`weightsync.transports.net.handshake`). Beyond loopback the connection is encrypted
(:mod:`weightsync.transports.net.tls`), unless the publisher's settings say that the network is trusted.

Compiled loops send the tiles, and put what arrives where it belongs: no Python, and no pass over memory that the cache does not
serve, for each run.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from weightsync.arrays import Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.tensors.copies import check_keys
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.digest import columns_address
from weightsync.tensors.kernels import SLICE, receive_table, run_of_table, send_table
from weightsync.tensors.memory_views import memory_at
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import CONTROL, DATA, END, HEADER, Channel, FrameHeader
from weightsync.transports.net.connected_reader import ConnectedReader, Dial
from weightsync.transports.net.dialer import dialer
from weightsync.transports.net.encrypted_records import RECORD_BYTES
from weightsync.transports.net.frames import FRAME_BYTES, MAX_FRAME_BYTES, frames_of, wanted_tiles
from weightsync.transports.net.listening_publisher import ListenAddress, ListeningPublisher, NetworkTransport, PublisherAddress
from weightsync.transports.net.messages import (
    ANSWER_BYTES,
    Ready,
    RegisterTiles,
    Start,
    TableBudget,
    decode_control,
    reported,
    send_request,
    serve_requests,
    transfer_deadline,
    unless_failed,
)
from weightsync.transports.net.tls import EncryptedChannel, reader_context


class _Arriving:
    """Where a running transfer is."""

    def __init__(self, version: int, header: FrameHeader, tiles: TileStream) -> None:
        self.version = version
        self.header = header  # of the frame that comes next
        self.tiles = tiles
        self.sequence = 0


class StreamReader(ConnectedReader):
    """A :class:`~weightsync.transports.base.Reader` to which the publisher streams. Holds a :class:`TileStream`."""

    def __init__(self, dial: Dial, deadline: Deadline) -> None:
        self._stream: _Arriving | None = None
        self._ends: list[Int64] = []
        self._header = bytearray(HEADER.size)
        super().__init__(dial, deadline)

    def _unfinished(self) -> bool:
        return self._stream is not None

    def _drop(self) -> None:
        self._stream = None
        super()._drop()

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        super().prepare(groups, layout_digest, deadline)
        self._ends = [np.cumsum(tiles.rows * tiles.row_bytes) for tiles in self._groups]

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self._idle()
        channel = self._connected(deadline)
        with self._in_step():
            send_request(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
            header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
            if header.kind == CONTROL:
                self._raise_failure(channel, header, deadline)
        self._stream = _Arriving(version, header, TileStream(channel))

    def _raise_failure(self, channel: Channel, header: FrameHeader, deadline: Deadline) -> None:
        answer = unless_failed(decode_control(channel, header, ANSWER_BYTES, deadline))
        raise ProtocolError(f"{channel.peer} sent {type(answer).__name__} instead of data")

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        channel, stream = self._under_way(self._stream)
        self._check_group(group, len(self._groups))
        with self._in_step():
            deadline.remaining(f"reading group {group}")
            done, wanted = 0, len(self._groups[group])
            while done < wanted:
                self._check_frame(channel, stream, group, done, deadline)
                done = stream.header.last
                self._receive(channel, stream, deadline, digests)

    def _check_frame(self, channel: Channel, stream: _Arriving, group: int, done: int, deadline: Deadline) -> None:
        header = stream.header
        if header.kind == CONTROL:
            self._raise_failure(channel, header, deadline)
        ends = self._ends[group]
        due = (DATA, stream.sequence, stream.version, group, done)
        if header[:5] != due or not done < header.last <= len(ends):
            raise ProtocolError(
                f"{channel.peer} sent frame {tuple(header)} where (kind, sequence, version, group, tile) {due} was due"
            )
        nbytes = int(ends[header.last - 1]) - (int(ends[done - 1]) if done else 0)
        if header.nbytes != nbytes or nbytes > MAX_FRAME_BYTES:
            raise ProtocolError(f"{channel.peer} sent a frame of {header.nbytes} bytes for tiles of {nbytes}")

    def _receive(self, channel: Channel, stream: _Arriving, deadline: Deadline, digests: UInt64 | None) -> None:
        """Take in the frame whose header was read, and the header that follows (an end at least)."""
        _, _, _, group, first, last, nbytes = stream.header
        stream.tiles.receive(self._groups[group], first, last, nbytes, deadline, digests)
        channel.receive_into([memoryview(self._header)], deadline)
        stream.header = FrameHeader.unpack(self._header)
        stream.sequence += 1

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, stream = self._under_way(self._stream)
        with self._in_step():
            deadline.remaining("ending the transfer")
            if stream.header.kind == CONTROL:
                self._raise_failure(channel, stream.header, deadline)
            if stream.header[:3] != (END, stream.sequence, stream.version):
                raise ProtocolError(f"{channel.peer} was not at the end of its transfer: not every group was read, or in order")
        self._stream = None

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """End the transfer at an error, and drop the connection, unless the publisher itself reported the error.

        Then its stream ended there, and the connection can be used again.
        """
        try:
            yield
        except BaseException as error:
            self._stream = None
            if not reported(error):
                self._drop()
            raise


_LOOK_NANOSECONDS = 50_000_000  # the compiled loops come back so often, to look at the deadline
_AGAIN = (0, errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


class TileStream:
    """Sends and receives tiles over one channel. Holds a bucket for short runs, of 256 KiB or one record.

    Both methods raise as those of :class:`~weightsync.transports.net.channel.Channel` do. The caller has checked the tiles' bounds.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._bucket = np.empty(RECORD_BYTES if channel.encrypted else SLICE, np.uint8)
        self._status = np.zeros(3, np.int64)  # an error number, and room for a clock reading

    def send(self, tiles: CopyTable, addresses: Int64, first: int, last: int, nbytes: int, deadline: Deadline) -> None:
        """Send tiles ``first <= i < last``, which hold ``nbytes`` bytes; ``addresses`` is where each source region begins."""
        bucket, status = self._bucket.ctypes.data, self._status.ctypes.data
        table, bases = tiles.table_address, addresses.ctypes.data
        done = 0
        while done < nbytes and self._channel.encrypted:
            ready = send_table(-1, table, first, last, bases, done, bucket, self._bucket.nbytes, 0, status)
            self._channel.send((memory_at(int(self._status[1]), ready - done),), deadline)
            done = ready
            self._check()
        while done < nbytes:
            self._channel.bound(socket.SO_SNDTIMEO, deadline, "sending to")
            until = time.monotonic_ns() + _LOOK_NANOSECONDS
            fd = self._channel.socket.fileno()
            done = send_table(fd, table, first, last, bases, done, bucket, self._bucket.nbytes, until, status)
            self._check()

    def receive(self, tiles: CopyTable, first: int, last: int, nbytes: int, deadline: Deadline, digests: UInt64 | None) -> None:
        """Fill the targets of tiles ``first <= i < last``; with ``digests``, add each tile's, read from its target."""
        bucket, status = self._bucket.ctypes.data, self._status.ctypes.data
        out = 0
        if digests is not None:
            check_keys(tiles, digests)
            out = digests.ctypes.data
        table, done = tiles.table_address, 0
        while done < nbytes and self._channel.encrypted:
            room = run_of_table(table, first, last, done, status)
            at = int(self._status[1])
            opened, in_place = self._channel.receive_part(nbytes - done, deadline, memory_at(at, min(room, RECORD_BYTES)))
            if not in_place:
                at = np.frombuffer(opened, np.uint8).ctypes.data
            self._status[1] = len(opened)
            done = receive_table(-1, table, first, last, done, nbytes, at, 0, out, columns_address, status)
            self._check()
        while done < nbytes:
            self._channel.bound(socket.SO_RCVTIMEO, deadline, "receiving from")
            until = time.monotonic_ns() + _LOOK_NANOSECONDS
            fd = self._channel.socket.fileno()
            done = receive_table(fd, table, first, last, done, nbytes, bucket, until, out, columns_address, status)
            self._check()

    def _check(self) -> None:
        number = int(self._status[0])
        if number:
            self._status[0] = 0
            if number < 0:
                raise self._channel.lost()
            if number not in _AGAIN:
                raise self._channel.lost(OSError(number, os.strerror(number)))
        if self._channel.aborted:
            raise self._channel.lost()


class Sender:
    """Serves one authenticated reader of ``region`` until it goes away. Holds a :class:`TileStream`.

    ``budget`` is what all readers of the region share; ``busy`` gives a context in which each transfer runs.
    """

    def __init__(
        self, region: PublishedRegion, channel: Channel, budget: TableBudget, busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._channel, self._budget, self._busy = channel, budget, busy
        self._layout_digest = region.layout_digest
        self._header = region.header  # with the payload, keeps the memory mapped whatever happens to the region
        self._payload = region.payload
        self._addresses = np.array([region.address], np.int64)
        self._tiles = CopyTable.empty()
        self._frames: Int64 = np.empty((0, 5), np.int64)
        self._stream_of_tiles = TileStream(channel)

    def run(self) -> None:
        """Answer requests. Raises what ends the connection."""
        serve_requests(self._channel, self._budget, {RegisterTiles: self._remember, Start: self._start})

    def _remember(self, want: RegisterTiles) -> Ready:
        self._frames = np.empty((0, 5), np.int64)
        tiles, counts = wanted_tiles(want, self._layout_digest, (len(self._payload),), FRAME_BYTES)
        self._tiles, self._frames = tiles, frames_of(counts, tiles.rows * tiles.row_bytes)
        return Ready()

    def _start(self, request: Start) -> None:
        deadline = transfer_deadline(request.seconds)
        with self._busy():
            self._stream(request.version, deadline)

    def _stream(self, version: int, deadline: Deadline) -> None:
        stamp = self._header.require(version)
        channel = self._channel
        for sequence, (group, offset, first, last, nbytes) in enumerate(self._frames.tolist()):
            self._header.require_unchanged(stamp)
            header = FrameHeader(DATA, sequence, version, group, first - offset, last - offset, nbytes).pack()
            channel.send([header], deadline, more=True)
            self._stream_of_tiles.send(self._tiles, self._addresses, first, last, nbytes, deadline)
        # Whatever was overwritten since it was sent is caught here at the latest: a reader believes nothing before the end.
        self._header.require_unchanged(stamp)
        channel.send([FrameHeader(END, len(self._frames), version).pack()], deadline)


class TcpPublisher(ListeningPublisher):
    """Sends each reader what it asks for."""

    def __init__(self, transport: Transport, region: PublishedRegion, key: bytes, local_host: Host, listen: ListenAddress) -> None:
        self._region, self._budget = region, TableBudget(region.nbytes)
        super().__init__(transport, key, local_host, listen)

    def _serve(self, channel: Channel) -> None:
        Sender(self._region, channel, self._budget, self.busy).run()


class Tcp(NetworkTransport):
    """The transport ``tcp``.

    ``bind`` is the address to listen on, ``port`` 0 for any, ``advertise`` the address that readers get instead.

    Without ``bind`` it listens where the trainer's :class:`~weightsync.transports.base.Network` says, or on loopback. Without
    ``encrypt`` it does as the network says, or encrypts beyond loopback. Readers do as the publisher's address says.
    """

    name = "tcp"
    traits = Traits(encrypted=True)

    def __init__(self, bind: str | None = None, port: int = 0, advertise: str | None = None, encrypt: bool | None = None) -> None:
        self._bind, self._port, self._advertise, self._encrypt = bind, port, advertise, encrypt

    def publish(self, region: PublishedRegion, key: bytes, local_host: Host, network: Network = LOOPBACK) -> ListeningPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        encrypt = network.encrypt if self._encrypt is None else self._encrypt
        listen = ListenAddress(self._bind or network.address, self._port, self._advertise, encrypt)
        return TcpPublisher(self, region, key, local_host, listen)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> StreamReader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, publisher_id, fingerprint = PublisherAddress.parse(offer.address)
        if offer.traits.encrypted and not fingerprint:
            raise ProtocolError(f"{offer.address!r} names no certificate, and the offer says that it is encrypted")
        make: Callable[[socket.socket, str], Channel] = Channel
        if fingerprint:
            make = functools.partial(EncryptedChannel, context=reader_context(), fingerprint=fingerprint)

        return StreamReader(dialer(host, port, publisher_id, key, make), deadline)
