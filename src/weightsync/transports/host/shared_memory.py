"""Transport ``shared_memory``: the reader maps the publisher's region, read-only, and copies from it itself.

They meet at a Unix socket (:mod:`weightsync.transports.host.unix_socket`). A reader of the same user that proves to know the run's
key gets the region's descriptor over it, opened for reading only. The connection then stays open, unused, so that each end notices
the other's death.
"""

from __future__ import annotations

import os
import sys

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import Host, Offer, Traits, decoding
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.mapped import MappedReader
from weightsync.transports.host.memory import map_read_only
from weightsync.transports.host.region import HEADER_BYTES, PublishedRegion
from weightsync.transports.host.unix_socket import LocalPublisher, open_local
from weightsync.transports.net.channel import Channel

_PREFIX = "weightsync-"
_FACTS_BYTES = 512


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and layout of a region, sent to a reader with its file descriptor."""

    nbytes: int
    layout_digest: str


class SharedMemoryPublisher(LocalPublisher):
    """Hands the region's descriptor to authenticated readers of the same user."""

    def __init__(self, region: PublishedRegion, key: bytes, local_host: Host) -> None:
        self._region = region
        super().__init__(SharedMemory, "shared memory", _PREFIX, lambda: region.fd, key, local_host)

    def _facts(self) -> bytes:
        return msgspec.msgpack.encode(_Facts(self._region.nbytes, self._region.layout_digest))


class SharedMemoryReader(MappedReader):
    """A read-only mapping of another process's region, and the connection that tells whether that process lives."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        data, fd = channel.receive_descriptor(_FACTS_BYTES, deadline)
        try:
            with decoding(f"{channel.peer} described its region wrongly"):
                facts = msgspec.msgpack.decode(data, type=_Facts)
            if facts.nbytes < 0:
                raise ProtocolError("the publisher announced a region of negative size")
            memory = map_read_only(fd, HEADER_BYTES + facts.nbytes)
        finally:
            os.close(fd)
        super().__init__(memory, facts.nbytes, facts.layout_digest, channel.peer)
        self._channel = channel

    @classmethod
    def connect(cls, offer: Offer, key: bytes, deadline: Deadline) -> SharedMemoryReader:
        """Connect to the publisher behind ``offer``. See :meth:`weightsync.transports.base.Transport.open`."""
        return open_local(_PREFIX, offer, key, deadline, cls)

    def _publisher_lives(self) -> bool:
        return self._channel.peer_lives()

    def _release(self) -> None:
        self._channel.close()


class SharedMemory(Transport):
    """The transport ``shared_memory``."""

    name = "shared_memory"
    traits = Traits(reach="host", live_source=True)

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            return None
        return "shared memory needs Linux (memfd and abstract sockets); use inproc or tcp on this machine"

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return self.unavailable() is None and offer.host.memory == local_host.memory and offer.address.startswith(_PREFIX)

    def publish(self, region: PublishedRegion, key: bytes, local_host: Host, network: Network = LOOPBACK) -> SharedMemoryPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return SharedMemoryPublisher(region, key, local_host)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> SharedMemoryReader:
        """See :class:`weightsync.transports.base.Transport`."""
        return SharedMemoryReader.connect(offer, key, deadline)
