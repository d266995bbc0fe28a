"""A region of one rank that readers reach: its key, the publishers of the transports that read it, and their offers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import Host, Memory, Offer
from weightsync.transports.base import LOOPBACK, Network, Publisher, Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, PublishedRegion


@dataclass(frozen=True)
class ReaderAccess:
    """How readers reach what a rank publishes: the transports, the key that both sides prove to have, and where the rank is."""

    transports: Sequence[Transport]
    key: bytes = field(repr=False)
    host: Host
    network: Network = LOOPBACK


class Publication:
    """Publishes a region by those of ``transports`` that read its memory. Base of shards and of streams, which make the region."""

    manifest: Manifest
    layout: Layout
    region: PublishedRegion | CudaRegion

    def __init__(self, access: ReaderAccess) -> None:
        self._access = access
        self._publishers: list[Publisher] = []
        self._owned = ExitStack()

    @property
    def key(self) -> bytes:
        """What readers of this rank must know."""
        return self._access.key

    @property
    def offers(self) -> tuple[Offer, ...]:
        """How engine ranks reach the region, in the order of the transports given."""
        return tuple(publisher.offer for publisher in self._publishers)

    def _publish(self, region: PublishedRegion | CudaRegion, memory: Memory, owned: ExitStack) -> str:
        """Publish ``region`` by those transports that read its ``memory``; ``owned`` closes the publishers.

        Returns:
            Why some transports cannot publish device memory.

        Raises:
            TransportUnavailable: A transport cannot publish memory of the host.
            ConfigurationError: A transport cannot encrypt where it must.
        """
        self._publishers, reasons = [], []
        for transport in self._access.transports:
            if memory not in transport.traits.reads:
                continue
            try:
                publisher = transport.publish(region, self.key, self._access.host, self._access.network)
            except TransportUnavailable as error:
                if memory == "host":
                    raise
                reasons.append(f"{transport.name}: {error}")
                continue
            owned.callback(publisher.close)
            self._publishers.append(publisher)
            traits = publisher.offer.traits
            if self._access.network.encrypt and traits.reach == "network" and not traits.encrypted:
                raise ConfigurationError(
                    f"transport {transport.name!r} does not encrypt: leave it out, or say that the network is trusted "
                    "(WEIGHTSYNC_DATA_ENCRYPTION=off)"
                )
        return "; ".join(reasons)

    def withdraw(self) -> None:
        """Let readers find no version from here on; those that are reading notice. Safe to repeat, and after :meth:`close`."""
        if self.region.version != EMPTY:
            self.region.header.invalidate()

    def close(self) -> None:
        """Stop serving and free the region. Safe twice."""
        self._owned.close()
