"""Transport ``collective``: what readers want alike is packed once and broadcast to all of them, by a process group of its own.

Everybody else here reads on his own. Where many engine ranks want the same bytes (streamed delivery: all of them, bucket by
bucket), this sends them once from the trainer rank, along gloo's tree. Readers still ask, over the connection that ``tcp`` has
too: those with equal wishes that begin the same version within :attr:`Collective.gather_seconds` of each other, or all that are
prepared, form a group, which is kept until its members change (an **epoch**). What only one reader wants goes the same way, to
that one. The price is what every collective has: a member that dies or stops holds up the others of its group, until it is noticed
or the deadline comes, and they fail with it; their next attempt makes a new group.

Members are authenticated as for ``tcp``; the group's own connections are not, and nothing is encrypted. Bytes are believed only
once their digests are the published ones. Use it in a trusted network.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Host, Offer, Traits
from weightsync.transports.base import LOOPBACK, Network
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.joining import JoiningReader
from weightsync.transports.broadcast.receiver import CollectiveReader
from weightsync.transports.broadcast.sender import CollectivePublisher, GatheringPublisher
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import greet_owner
from weightsync.transports.tcp.transport import Tcp, open_channel, parse_address

__all__ = ["Collective", "dial_owner"]

Dial = Callable[[Callable[[Channel], None], Deadline], Channel]

_MOST_SECONDS = 3600.0


class Collective(Tcp):
    """The transport ``collective``: host memory, over gloo. Addresses as for ``tcp``, buffers as :class:`BufferSettings`.

    The sender's buffers decide the size of a bucket; a reader takes as many of that size as its own ``num_buffers``.
    """

    name = "collective"
    traits = Traits(shared_fate=True)

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
        super().__init__(bind, port, advertise)
        if isinstance(gather_seconds, bool) or not isinstance(gather_seconds, int | float):
            raise ConfigurationError(f"gather_seconds is a number of seconds, not {gather_seconds!r}")
        if not (math.isfinite(gather_seconds) and 0 <= gather_seconds <= _MOST_SECONDS):
            raise ConfigurationError(f"gather_seconds is from 0 to {_MOST_SECONDS:g}, not {gather_seconds!r}")
        self.gather_seconds = float(gather_seconds)
        self.buffers = BufferSettings(buffer_bytes, buffer_memory_ratio, num_buffers)

    def unavailable(self) -> str | None:
        """See :class:`weightsync.transports.base.Transport`."""
        return None if dist.is_available() and dist.is_gloo_available() else "this torch was built without gloo"

    def publish(self, shelf: PublishedRegion, key: bytes, here: Host, network: Network = LOOPBACK) -> GatheringPublisher:
        """See :class:`weightsync.transports.base.Transport`."""
        return CollectivePublisher(shelf, key, here, self.traits, self._where(network), self.buffers, self.gather_seconds)

    def _where(self, network: Network) -> tuple[str, int, str | None]:
        return self._bind or network.address, self._port, self._advertise

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> JoiningReader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, dial = dial_owner(offer, key)
        return CollectiveReader(dial, deadline, host, self.buffers)


def dial_owner(offer: Offer, key: bytes) -> tuple[str, Dial]:
    """The owner's host, and how to connect to it. Raises :class:`~weightsync.errors.ProtocolError` for an impossible address."""
    host, port, owner_id = parse_address(offer.address)

    def dial(adopt: Callable[[Channel], None], deadline: Deadline) -> Channel:
        channel = open_channel(host, port, adopt, deadline)
        greet_owner(channel, key, owner_id, deadline)
        return channel

    return host, dial
