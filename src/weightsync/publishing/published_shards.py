"""The shards of one rank in a region that readers reach.

That is a region in host memory, which takes a copy, or, on a CUDA device, the shards themselves, which takes none: see
:mod:`weightsync.publishing.in_place`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt
import torch

from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import Host, Memory, Offer
from weightsync.protocol.tokens import is_loopback
from weightsync.publishing.host_copy import HostPublisher
from weightsync.publishing.in_place import InPlacePublisher, obstacle_to_in_place
from weightsync.spans import span
from weightsync.tensors.device_memory import wait_for_devices
from weightsync.tensors.memory import packed_layout
from weightsync.tensors.shards import DTypes, FollowedShards, Shard, ShardedState
from weightsync.transports.base import LOOPBACK, Key, Network, Publisher, Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import EMPTY, PublishedRegion
from weightsync.transports.hostinfo import own_address, reachable_address
from weightsync.transports.select import transports_for

__all__ = ["PublishedShards", "network_of", "publish_region", "publishing_transports"]

_log = logging.getLogger(__name__)


class PublishedShards:
    """Holds the region of one rank and publishes it by every transport given that reads its memory.

    ``state`` is a module or a state dict whose tensors are plain (held whole) or DTensors.

    Where all shards are on one CUDA device and nothing is converted, that memory itself is published (:attr:`in_place`) by those
    transports that read CUDA memory and can reach it, and costs nothing more. Without them the shards are copied to a region of
    host memory, published by those that read host memory, which costs one copy of this rank's shards, in the published dtype, for
    as long as the object lives. Raises what :func:`~weightsync.tensors.shards.shards_of` and
    :class:`~weightsync.transports.host.region.PublishedRegion` raise, :class:`~weightsync.errors.TransportUnavailable` if no
    transport can publish the shards, and :class:`~weightsync.errors.ConfigurationError` if one cannot encrypt where it must.

    Not thread-safe, except that another thread may set ``stop[0]`` of a :meth:`placing` that runs.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        transports: Sequence[Transport],
        key: bytes,
        local_host: Host,
        *,
        network: Network = LOOPBACK,
        dtype: DTypes = None,
        include_buffers: bool = False,
    ) -> None:
        self.manifest: Manifest
        followed = FollowedShards(state, dtype=dtype, include_buffers=include_buffers)
        self.manifest, shards = followed.now()
        if not self.manifest.nbytes:
            raise ConfigurationError("this rank's state holds no bytes: give the module, or a state dict with tensors")
        self._key = Key(key)
        self._shards: list[Shard] = []
        self._publishers: list[Publisher]
        self.region: PublishedRegion | CudaRegion
        self._placer: HostPublisher | InPlacePublisher
        with ExitStack() as owned:
            reason = obstacle_to_in_place(self.manifest, shards, transports)
            self._live = None if reason else InPlacePublisher(self.manifest, state, shards)
            if self._live is not None:
                owned.callback(self._live.region.close)
                self._publishers, reason = publish_region(self._live.region, "cuda", transports, key, local_host, network, owned)
                if not self._publishers:
                    owned.close()
                    self._live = None
                elif reason:
                    _log.info("this rank's GPU memory is not published by every transport: %s", reason)
            # Memory that is read in place is looked for at every placing, and must not be kept here: a trainer may offload it.
            self._followed = None if self._live is not None else followed
            if self._live is not None:
                self.layout: Layout = self._live.layout
                self.region, self._placer = self._live.region, self._live
            else:
                if transports and not any("host" in transport.traits.reads for transport in transports):
                    raise TransportUnavailable(
                        f"{', '.join(transport.name for transport in transports)} cannot be used: {reason}. Allow "
                        f"shared_memory or tcp too, "
                        "which read a copy"
                    )
                self._shards = shards
                self.layout = packed_layout(self.manifest, shards)
                region = PublishedRegion(self.layout.regions[0] if self.layout.regions else 0, self.layout.digest)
                owned.callback(region.close)
                self._region_address = region.address
                self.region, self._placer = region, HostPublisher(self.manifest, shards, self.layout, region.address)
                self._publishers, _ = publish_region(region, "host", transports, key, local_host, network, owned)
            self._owned = owned.pop_all()

    @property
    def key(self) -> bytes:
        """What readers of this rank must know."""
        return self._key.reveal()

    @property
    def in_place(self) -> bool:
        """Whether the rank's own memory is read, and not a copy."""
        return self._live is not None

    @property
    def offers(self) -> tuple[Offer, ...]:
        """How engine ranks reach the shards, in the order of the transports given."""
        return tuple(publisher.offer for publisher in self._publishers)

    def follow(self) -> None:
        """Take up the shards where they are now: a framework may have given parameters other memory since the last time.

        Raises:
            ConfigurationError: The shards are others than before.
        """
        if self._followed is None:
            return
        manifest, shards = self._followed.now()
        if shards is self._shards:
            return
        layout = packed_layout(manifest, shards)
        if manifest.fingerprint != self.manifest.fingerprint or layout.digest != self.layout.digest:
            raise ConfigurationError(
                "this rank holds other tensors or shards than when it was made: make a new weightsync.Trainer or weightsync.Engine"
            )
        self._shards = shards
        self._placer = HostPublisher(manifest, shards, layout, self._region_address)

    @contextmanager
    def placing(self, number: int, stop: npt.NDArray[np.int8], deadline: Deadline) -> Iterator[npt.NDArray[np.uint64]]:
        """Bring the shards as they are now into the region. Readers find version ``number`` if the block did not raise.

        Yields the digest of each row of the layout.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            DeadlineExceeded: ``deadline`` passed.
        """
        with span("wait"):
            wait_for_devices(self._shards, deadline)  # for what was queued before, in whatever stream
        with self.region.placing(number):
            with span("digest" if self.in_place else "copy"):
                digests = self._placer.place(stop, deadline)
            yield digests

    def withdraw(self) -> None:
        """Let readers find no version from here on; those that are reading notice. Safe to repeat, and after :meth:`close`."""
        if self._live is not None:
            self._live.withdraw()
        elif isinstance(self.region, PublishedRegion) and self.region.version != EMPTY:
            self.region.header.invalidate()

    def close(self) -> None:
        """Stop serving and free the region. Safe twice."""
        self._owned.close()


def publishing_transports(given: Sequence[Transport | str] | None, network: Network) -> tuple[Transport, ...]:
    """The transports by which a rank publishes, where it is reached as ``network`` says. See :func:`transports_for`."""
    return transports_for(given, not is_loopback(network.address) if network.encrypt is None else network.encrypt)


def network_of(settings: ClientSettings) -> Network:
    """Where readers of other hosts reach this one, if the coordinator can be reached from there."""
    where = own_address(settings.data_host) if settings.data_host is not None else None
    if where is None and not is_loopback(settings.coordinator.host):
        where = reachable_address(settings.coordinator.host, settings.coordinator.port)
    return Network(where or LOOPBACK.address, None if settings.data_encryption is None else settings.data_encryption == "on")


def publish_region(
    region: PublishedRegion | CudaRegion,
    memory: Memory,
    transports: Sequence[Transport],
    key: bytes,
    local_host: Host,
    network: Network,
    owned: ExitStack,
) -> tuple[list[Publisher], str]:
    """Publish ``region`` by those of ``transports`` that read its ``memory``; ``owned`` closes the publishers.

    Returns:
        The publishers, and why some transports cannot publish device memory.

    Raises:
        TransportUnavailable: A transport cannot publish memory of the host.
        ConfigurationError: A transport cannot encrypt where it must.
    """
    publishers: list[Publisher] = []
    reasons = []
    for transport in transports:
        if memory not in transport.traits.reads:
            continue
        try:
            publisher = transport.publish(region, key, local_host, network)
        except TransportUnavailable as error:
            if memory == "host":
                raise
            reasons.append(f"{transport.name}: {error}")
            continue
        owned.callback(publisher.close)
        publishers.append(publisher)
        traits = publisher.offer.traits
        if network.encrypt and traits.reach == "network" and not traits.encrypted:
            raise ConfigurationError(
                f"transport {transport.name!r} does not encrypt: leave it out, or say that the network is trusted "
                "(WEIGHTSYNC_DATA_ENCRYPTION=off)"
            )
    return publishers, "; ".join(reasons)
