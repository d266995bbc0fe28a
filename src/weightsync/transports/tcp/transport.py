"""Transport ``tcp``: the publisher sends the requested tiles over one connection. IPv4 and IPv6.

Both ends prove themselves (:mod:`weightsync.transports.net.handshake`). Beyond loopback the connection is encrypted
(:mod:`weightsync.transports.net.tls`), unless the publisher's settings say that the network is trusted.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from weightsync.arrays import Int64
from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import DATA, END, Channel, FrameHeader
from weightsync.transports.net.dialer import dialer
from weightsync.transports.net.frames import FRAME_BYTES, frames_of, wanted_tiles
from weightsync.transports.net.listening_publisher import ListenAddress, ListeningPublisher, NetworkTransport, PublisherAddress
from weightsync.transports.net.messages import Ready, RegisterTiles, Start, TableBudget, serve_requests, transfer_deadline
from weightsync.transports.net.tls import EncryptedChannel, reader_context
from weightsync.transports.tcp.receiver import StreamReader
from weightsync.transports.tcp.tile_stream import TileStream


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
