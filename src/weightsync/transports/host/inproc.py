"""Transport ``inproc``: publisher and reader are in one process, and the reader copies from the region itself."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import weakref

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, PeerLost
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.mapped import MappedReader
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import this_process
from weightsync.transports.net.handshake import check_key

_publishers: dict[str, InProcessPublisher] = {}
_lock = threading.Lock()


def _prefix() -> str:
    return f"{this_process()}-"


class InProcessPublisher:
    """Lets readers of the same process reach ``region``, under a name that only the offer tells."""

    def __init__(self, region: PublishedRegion, key: bytes, local_host: Host) -> None:
        check_key(key)
        self.region = region
        self._key = hashlib.sha256(key).digest()
        self._sources: weakref.WeakSet[InProcessReader] = weakref.WeakSet()
        self.offer = Offer(
            scheme=InProcess.name, address=_prefix() + secrets.token_hex(16), host=local_host, traits=InProcess.traits
        )
        with _lock:
            _publishers[self.offer.address] = self

    def admit(self, key: bytes) -> InProcessReader:
        """A source of this publisher's region. Raises :class:`~weightsync.errors.AuthenticationError` for another key."""
        if not hmac.compare_digest(hashlib.sha256(key).digest(), self._key):
            raise AuthenticationError("the source in this process has another run key")
        source = InProcessReader(self)
        with _lock:
            if _publishers.get(self.offer.address) is not self:
                raise PeerLost("the source in this process stopped serving")
            self._sources.add(source)
        return source

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        with _lock:
            _publishers.pop(self.offer.address, None)
            sources = list(self._sources)
        for source in sources:
            source.lose_publisher()


class InProcessReader(MappedReader):
    """Reads another object's memory in the same process."""

    def __init__(self, publisher: InProcessPublisher) -> None:
        region = publisher.region
        super().__init__(region.memory, region.nbytes, region.layout_digest, "the source in this process")
        self._lives = True

    def _release(self) -> None:
        """Nothing is held but the memory."""

    def _publisher_lives(self) -> bool:
        return self._lives

    def lose_publisher(self) -> None:
        """The publisher closes: end what is running."""
        self._lives = False
        self._stop[0] = 1


class InProcess(Transport):
    """The transport ``inproc``."""

    name = "inproc"
    traits = Traits(reach="process", live_source=True)

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return offer.address.startswith(_prefix())

    def publish(self, region: PublishedRegion, key: bytes, local_host: Host, network: Network = LOOPBACK) -> InProcessPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return InProcessPublisher(region, key, local_host)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> InProcessReader:
        """See :class:`weightsync.transports.base.Transport`."""
        with _lock:
            publisher = _publishers.get(offer.address)
        if publisher is None:
            raise PeerLost("nothing is published under this name in this process")
        return publisher.admit(key)
