"""What the broadcast transports have in common: their settings, and how readers find their publisher.

What readers want alike is packed once and broadcast to all of them, through a process group of its own. Every other transport
serves each reader by itself. Where many engine ranks want the same bytes (streamed delivery: all of them, bucket by bucket), a
broadcast sends them once from the trainer rank. Readers ask over a connection like that of ``tcp``: those with equal tables of
tiles that begin the same version within ``gather_seconds`` of each other, or all that are prepared, form a group, which is kept
until its members change (an **epoch**). What only one reader wants goes the same way, to that one. The price is what every
collective has: a member that dies or stops holds up the others of its group, until it is noticed or the deadline comes, and
they fail with it; their next attempt makes a new group. The windows of a stream go to all readers, and are sent again to those
that are left (:class:`~weightsync.errors.BroadcastBroken`).

Members are authenticated as for ``tcp``; the group's own connections are not, and nothing is encrypted. Bytes are believed only
once their digests are the published ones. Use it in a trusted network.

A wire is a kind of process group and the memory at its ends: :mod:`~weightsync.transports.broadcast.collective` for host memory,
:mod:`~weightsync.transports.broadcast.nccl` for GPUs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import LOOPBACK, Network, Reader
from weightsync.transports.broadcast.reader import LEAST_BUFFER, MOST_BUFFER, BroadcastReader, ReceivingWire
from weightsync.transports.broadcast.sender import BroadcastPublisher, SendingWire
from weightsync.transports.net.dialer import dialer
from weightsync.transports.net.listening_publisher import ListenAddress, NetworkTransport, PublisherAddress

_MOST_SECONDS = 3600.0
_MOST_BUFFERS = 16


@dataclass(frozen=True)
class BufferSettings:
    """``num_buffers`` buffers at each end, used in turn: one is packed or unpacked while another is on its way.

    Each has ``buffer_bytes`` bytes, from 2 MiB to 4 GiB; or all together take ``buffer_memory_ratio`` of the memory that is free
    at the sender when its first group is made (up to a half; the rule's result is kept within the same bounds). Give one of the two
    at most; without either, the transport's own default. Raises :class:`~weightsync.errors.ConfigurationError` for anything else.
    """

    buffer_bytes: int | None = None
    buffer_memory_ratio: float | None = None
    num_buffers: int = 2

    def __post_init__(self) -> None:
        """Check each value: settings come from people."""
        if _not_int(self.num_buffers) or not 1 <= self.num_buffers <= _MOST_BUFFERS:
            raise ConfigurationError(f"num_buffers is a number from 1 to {_MOST_BUFFERS}, not {self.num_buffers!r}")
        if self.buffer_bytes is not None:
            if self.buffer_memory_ratio is not None:
                raise ConfigurationError("give buffer_bytes or buffer_memory_ratio, not both")
            if _not_int(self.buffer_bytes) or not LEAST_BUFFER <= self.buffer_bytes <= MOST_BUFFER:
                raise ConfigurationError(
                    f"buffer_bytes is a number of bytes from {LEAST_BUFFER:,} to {MOST_BUFFER:,}, not {self.buffer_bytes!r}"
                )
        ratio = self.buffer_memory_ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 0.5):
            raise ConfigurationError(f"buffer_memory_ratio is a part of the free memory, above 0 and at most 0.5, not {ratio!r}")

    def bytes_each(self, free: int, default: int) -> int:
        """The size of one buffer, where ``free`` bytes of memory are free. Whole 512-byte units."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes & -512
        if self.buffer_memory_ratio is None:
            return default
        return min(max(int(free * self.buffer_memory_ratio) // self.num_buffers, LEAST_BUFFER), MOST_BUFFER) & -512


def _not_int(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)


class Broadcast(NetworkTransport):
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
    def receiving(self) -> ReceivingWire:
        """Return a reader's end. Raises TransportUnavailable if there can be none here."""

    def publish(self, region: Any, key: bytes, local_host: Host, network: Network = LOOPBACK) -> BroadcastPublisher:  # noqa: ANN401
        """See :class:`weightsync.transports.base.Transport`."""
        listen = ListenAddress(self._bind or network.address, self._port, self._advertise)
        return BroadcastPublisher(self, region, self.sending(region), key, local_host, listen, self.gather_seconds)

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:
        """See :class:`weightsync.transports.base.Transport`."""
        host, port, publisher_id, _ = PublisherAddress.parse(offer.address)
        return BroadcastReader(dialer(host, port, publisher_id, key), deadline, host, self.receiving())
