"""Transport ``tcp``: the publisher sends the requested tiles over one connection. IPv4 and IPv6.

Both ends prove themselves (:mod:`weightsync.transports.net.handshake`). Beyond loopback the connection is encrypted
(:mod:`weightsync.transports.net.tls`), unless the publisher's settings say that the network is trusted.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.dialer import dialer, tune
from weightsync.transports.net.listening_publisher import ListeningPublisher
from weightsync.transports.net.messages import TableBudget
from weightsync.transports.net.publisher_address import PublisherAddress, reaches
from weightsync.transports.net.tls import EncryptedChannel, reader_context
from weightsync.transports.tcp.receiver import StreamReader
from weightsync.transports.tcp.sender import Sender

__all__ = ["Tcp", "TcpPublisher"]


class TcpPublisher(ListeningPublisher):
    """Sends each reader what it asks for."""

    def __init__(
        self,
        transport: Transport,
        region: PublishedRegion,
        key: bytes,
        local_host: Host,
        bind: str,
        port: int,
        advertise: str | None,
        encrypt: bool | None = False,
    ) -> None:
        self._region, self._budget = region, TableBudget(region.nbytes)
        super().__init__(transport, key, local_host, bind, port, advertise, encrypt)

    def _serve(self, channel: Channel) -> None:
        tune(channel.socket)
        Sender(self._region, channel, self._budget, self.busy).run()


class Tcp(Transport):
    """The transport ``tcp``.

    ``bind`` is the address to listen on, ``port`` 0 for any, ``advertise`` the address that readers get instead.

    Without ``bind`` it listens where the trainer's :class:`~weightsync.transports.base.Network` says, or on loopback. Without
    ``encrypt`` it does as the network says, or encrypts beyond loopback. Readers do as the publisher's address says.
    """

    name = "tcp"
    traits = Traits(encrypted=True)

    def __init__(self, bind: str | None = None, port: int = 0, advertise: str | None = None, encrypt: bool | None = None) -> None:
        self._bind, self._port, self._advertise, self._encrypt = bind, port, advertise, encrypt

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return reaches(offer, local_host)

    def publish(self, region: PublishedRegion, key: bytes, local_host: Host, network: Network = LOOPBACK) -> ListeningPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        encrypt = network.encrypt if self._encrypt is None else self._encrypt
        bind = self._bind or network.address
        return TcpPublisher(self, region, key, local_host, bind, self._port, self._advertise, encrypt)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> StreamReader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, publisher_id, fingerprint = PublisherAddress.parse(offer.address)
        if offer.traits.encrypted and not fingerprint:
            raise ProtocolError(f"{offer.address!r} names no certificate, and the offer says that it is encrypted")
        make: Callable[[socket.socket, str], Channel] = Channel
        if fingerprint:
            make = functools.partial(EncryptedChannel, context=reader_context(), fingerprint=fingerprint)

        return StreamReader(dialer(host, port, publisher_id, key, make), deadline)
