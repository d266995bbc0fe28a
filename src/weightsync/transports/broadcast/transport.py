"""What the broadcast transports have in common: their settings, and how readers find their publisher.

What readers want alike is packed once and broadcast to all of them, through a process group of its own. Every other transport
serves each reader by itself. Where many engine ranks want the same bytes (streamed delivery: all of them, bucket by bucket), a
broadcast sends them once from the trainer rank. Readers ask over a connection like that of ``tcp``: those with equal tables of
tiles that begin the same version within ``gather_seconds`` of each other, or all that are prepared, form a group, which is kept
until its members change (an **epoch**). What only one reader wants goes the same way, to that one. The price is what every
collective has: a member that dies or stops holds up the others of its group, until it is noticed or the deadline comes, and
they fail with it; their next attempt makes a new group.

Members are authenticated as for ``tcp``; the group's own connections are not, and nothing is encrypted. Bytes are believed only
once their digests are the published ones. Use it in a trusted network.

A wire is a kind of process group and the memory at its ends: :mod:`~weightsync.transports.broadcast.gloo` for host memory,
:mod:`~weightsync.transports.broadcast.nccl` for GPUs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import LOOPBACK, Network, Reader, Transport
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.sender import BroadcastPublisher, SendingWire
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.connected_reader import Dial
from weightsync.transports.net.handshake import greet_owner
from weightsync.transports.tcp.transport import open_channel, parse_address, reaches

__all__ = ["Broadcast"]

_MOST_SECONDS = 3600.0


class Broadcast(Transport):
    """Base of the broadcast transports. Addresses as for ``tcp``, buffers as :class:`BufferSettings`.

    The sender's buffers decide the size of a bucket; a reader takes as many of that size as its own ``num_buffers``.
    """

    def __init__(
        self,
        bind: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        *,
        buffer_bytes: int | None = None,
        buffer_memory_ratio: float | None = None,
        num_buffers: int = 2,
        gather_seconds: float = 2.0,
    ) -> None:
        if isinstance(gather_seconds, bool) or not isinstance(gather_seconds, int | float):
            raise ConfigurationError(f"gather_seconds is a number of seconds, not {gather_seconds!r}")
        if not (math.isfinite(gather_seconds) and 0 <= gather_seconds <= _MOST_SECONDS):
            raise ConfigurationError(f"gather_seconds is from 0 to {_MOST_SECONDS:g}, not {gather_seconds!r}")
        self._bind, self._port, self._advertise = bind, port, advertise
        self.gather_seconds = float(gather_seconds)
        self.buffers = BufferSettings(buffer_bytes, buffer_memory_ratio, num_buffers)

    @abstractmethod
    def sending(self, region: Any) -> SendingWire:  # noqa: ANN401 - a region of the kind that it can read
        """Return the sender's end for this region. Raises TransportUnavailable for memory that it cannot send from."""

    @abstractmethod
    def receiving(self, dial: Dial, deadline: Deadline, host: str) -> Reader:
        """Return a reader that asks over the channel that ``dial`` opens, and joins groups at ``host``."""

    def reaches(self, offer: Offer, local_host: Host) -> bool:
        """See :class:`weightsync.transports.base.Transport`."""
        return reaches(offer, local_host)

    def publish(self, region: Any, key: bytes, local_host: Host, network: Network = LOOPBACK) -> BroadcastPublisher:  # noqa: ANN401
        """See :class:`weightsync.transports.base.Transport`."""
        where = self._bind or network.address, self._port, self._advertise
        return BroadcastPublisher(self, region, self.sending(region), key, local_host, where, self.gather_seconds)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, owner_id = parse_address(offer.address)

        def dial(adopt: Callable[[Channel], None], deadline: Deadline) -> Channel:
            channel = open_channel(host, port, adopt, deadline)
            greet_owner(channel, key, owner_id, deadline)
            return channel

        return self.receiving(dial, deadline, host)
