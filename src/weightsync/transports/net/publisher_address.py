"""Addresses of publishers that listen on a socket."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer
from weightsync.protocol.tokens import is_loopback
from weightsync.transports.net.handshake import ID_BYTES
from weightsync.transports.net.tls import FINGERPRINT_BYTES

__all__ = ["PublisherAddress", "reaches"]


class PublisherAddress(NamedTuple):
    """An address: ``host:port/id``, or ``host:port/id/fingerprint`` of a publisher that speaks only TLS."""

    host: str
    port: int
    publisher_id: bytes
    fingerprint: bytes

    @classmethod
    def parse(cls, address: str) -> PublisherAddress:
        """Parse the address of an offer.

        Raises:
            ProtocolError: It is not an address.
        """
        where, _, rest = address.partition("/")
        publisher_id, secured, fingerprint = rest.partition("/")
        host, _, port = where.rpartition(":")
        try:
            host = host.removeprefix("[").removesuffix("]")
            parsed = cls(host, int(port), bytes.fromhex(publisher_id), bytes.fromhex(fingerprint))
        except ValueError:
            parsed = cls("", 0, b"", b"")
        lengths = ID_BYTES, FINGERPRINT_BYTES if secured else 0
        if not parsed.host or not 0 < parsed.port < 1 << 16 or (len(parsed.publisher_id), len(parsed.fingerprint)) != lengths:
            raise ProtocolError(f"{address!r} is not the address of a publisher (host:port/id, or host:port/id/fingerprint)")
        return parsed


def reaches(offer: Offer, local_host: Host) -> bool:
    """Return whether ``local_host`` could connect to the address of ``offer``: a loopback address only reaches its own host."""
    try:
        host = PublisherAddress.parse(offer.address).host
    except ProtocolError:
        return False
    return offer.host.name == local_host.name or not is_loopback(host)
