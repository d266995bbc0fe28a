"""Transport ``shared_memory``: the reader maps the owner's shelf, read-only, and copies from it itself.

The owner listens on a Linux abstract socket of an unguessable name: there is no file, so nothing to leave behind and no
directory whose permissions matter. A reader of the same user that proves to know the run's key gets the shelf's descriptor over
that socket, opened for reading only. The connection then stays open, unused, so that each end notices the other's death.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, PeerLost, ProtocolError, TransportUnavailable
from weightsync.protocol.messages import UNREADABLE, Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.host.mapped import MappedReader
from weightsync.transports.host.memory import map_read_only, reopen_read_only
from weightsync.transports.host.region import HEADER_BYTES, PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import HELLO_SECONDS, ID_BYTES, check_key, greet_owner
from weightsync.transports.net.listener import Listener, same_user

__all__ = ["SharedMemory", "SharedMemoryPublisher", "SharedMemoryReader"]

_PREFIX = "weightsync-"
_FACTS_BYTES = 512


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sent with the descriptor."""

    nbytes: int
    layout_digest: str


class SharedMemoryPublisher:
    """Hands the shelf's descriptor to authenticated readers of the same user."""

    def __init__(self, shelf: PublishedRegion, key: bytes, here: Host) -> None:
        if shelf.fd is None:
            raise TransportUnavailable("shared memory needs Linux: this machine's memory cannot be handed to another process")
        self._shelf = shelf
        owner_id = secrets.token_bytes(ID_BYTES)
        name = _PREFIX + owner_id.hex()
        self._offer = Offer(scheme=SharedMemory.name, address=name, host=here, traits=SharedMemory.traits)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind("\0" + name)
            self._listener = Listener(sock, "shared-memory", check_key(key), owner_id, self._serve, same_user)
        except BaseException:
            sock.close()
            raise

    @property
    def offer(self) -> Offer:
        """See :class:`weightsync.transports.base.Publisher`."""
        return self._offer

    def _serve(self, channel: Channel) -> None:
        shelf_fd = self._shelf.fd
        if shelf_fd is None:
            return  # the shelf was closed before its owner; the reader sees the connection end
        facts = msgspec.msgpack.encode(_Facts(self._shelf.nbytes, self._shelf.layout_digest))
        fd = reopen_read_only(shelf_fd)
        try:
            channel.send_descriptor(facts, fd, Deadline(HELLO_SECONDS))
        finally:
            os.close(fd)
        channel.wait_for_end()

    def close(self) -> None:
        """See :class:`weightsync.transports.base.Publisher`."""
        self._listener.close()


class SharedMemoryReader(MappedReader):
    """A read-only mapping of another process's shelf, and the connection that tells whether that process lives."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        data, fd = channel.receive_descriptor(_FACTS_BYTES, deadline)
        try:
            facts = msgspec.msgpack.decode(data, type=_Facts)
            if facts.nbytes < 0:
                raise ProtocolError("the owner announced a shelf of negative size")
            memory = map_read_only(fd, HEADER_BYTES + facts.nbytes)
        except UNREADABLE as error:
            raise ProtocolError(f"{channel.peer} described its shelf wrongly: {error}") from None
        finally:
            os.close(fd)
        super().__init__(memory, facts.nbytes, facts.layout_digest, channel.peer)
        self._channel = channel

    def _owner_lives(self) -> bool:
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

    def reaches(self, offer: Offer, here: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return self.unavailable() is None and offer.host.memory == here.memory and offer.address.startswith(_PREFIX)

    def publish(self, shelf: PublishedRegion, key: bytes, here: Host, network: Network = LOOPBACK) -> SharedMemoryPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return SharedMemoryPublisher(shelf, key, here)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> SharedMemoryReader:
        """See :class:`weightsync.transports.base.Transport`."""
        owner_id = bytes.fromhex(_hex(offer.address))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.remaining("connecting"))
            sock.connect("\0" + offer.address)
        except TimeoutError:
            sock.close()
            raise DeadlineExceeded("the trainer rank on this host did not accept a connection in time") from None
        except OSError as error:
            sock.close()
            raise PeerLost(f"no trainer rank listens at {offer.address} on this host: {error}") from error
        channel = Channel(sock, "the trainer rank on this host")
        try:
            if not same_user(sock):
                raise AuthenticationError(f"{channel.peer} belongs to another user")
            greet_owner(channel, key, owner_id, deadline)
            return SharedMemoryReader(channel, deadline)
        except BaseException:
            channel.close()
            raise


def _hex(address: str) -> str:
    digits = address.removeprefix(_PREFIX)
    if len(digits) != 2 * ID_BYTES or not set(digits) <= set("0123456789abcdef"):
        raise ProtocolError(f"{address!r} is not the address of a shared-memory owner")
    return digits
