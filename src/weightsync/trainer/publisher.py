"""A trainer rank's part of a round: place the shards where engine ranks can reach them.

That is a shelf in host memory, which takes a copy, or, on a CUDA device, the shards themselves, which takes none: see
:mod:`weightsync.trainer.in_place`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import Body, Done, Host, Memory, Offer, Place, Placed
from weightsync.spans import span
from weightsync.tensors.device_memory import wait_for_devices
from weightsync.tensors.memory import packed_layout
from weightsync.tensors.shards import FollowedShards, Shard, ShardedState
from weightsync.trainer.host_copy import HostPublisher
from weightsync.trainer.in_place import InPlacePublisher, obstacle_to_in_place
from weightsync.transports.base import LOOPBACK, Key, Network, Publisher, Transport
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion

__all__ = ["Placing", "TrainerRole", "publish_region"]

_PLACING_SECONDS = 60.0
_ANY = -1  # any number may be placed
_log = logging.getLogger(__name__)


class Placing:
    """The wait for the shards of one publication to be placed, or for its call to end without."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The number under which they were placed; ``None`` before."""
        self._over = threading.Event()

    def set(self) -> None:
        """End the wait. Any thread."""
        self._over.set()

    def wait(self, timeout: float) -> bool:
        """Return whether the wait was over within ``timeout`` seconds."""
        return self._over.wait(timeout)


class TrainerRole:
    """Holds the region of one trainer rank and publishes it by every transport given that reads its memory.

    ``state`` is a module or a state dict whose tensors are plain (held whole) or DTensors.

    Where all shards are on one CUDA device and nothing is converted, that memory itself is published (:attr:`live`) by those
    transports that read CUDA memory and can reach it, and costs nothing more. Without them the shards are copied to a region of
    host memory, published by those that read host memory, which costs one copy of this rank's shards, in the published dtype, for
    as long as the role lives. Raises what :func:`~weightsync.tensors.shards.shards_of` and
    :class:`~weightsync.transports.host.region.PublishedRegion` raise, :class:`~weightsync.errors.TransportUnavailable` if no
    transport can publish the shards, and :class:`~weightsync.errors.ConfigurationError` if one cannot encrypt where it must.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        transports: Sequence[Transport],
        key: bytes,
        local_host: Host,
        *,
        network: Network = LOOPBACK,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        include_buffers: bool = False,
    ) -> None:
        self.manifest: Manifest
        followed = FollowedShards(state, dtype=dtype, include_buffers=include_buffers)
        self.manifest, shards = followed.now()
        if not self.manifest.nbytes:
            raise ConfigurationError("this trainer rank's state holds no bytes: give the module, or a state dict with tensors")
        self._key = Key(key)
        self._stop = np.zeros(1, np.int8)
        self._busy = threading.Lock()
        self._armed: int | None = None
        self.epoch = 0
        """The epoch in which this rank publishes; 0 before the coordinator has sent it."""
        self._last: Placed | None = None
        self._placing = Placing()
        self._shards: list[Shard] = []
        self._publishers: list[Publisher] = []
        self.region: PublishedRegion | CudaRegion
        self._placer: HostPublisher | InPlacePublisher
        with ExitStack() as owned:
            reason = obstacle_to_in_place(self.manifest, shards, transports)
            self._live = None if reason else InPlacePublisher(self.manifest, state, shards)
            if self._live is not None:
                owned.callback(self._live.region.close)
                reason = self._publish(self._live.region, "cuda", transports, local_host, network, owned)
                if not self._publishers:
                    owned.close()
                    self._live = None
                elif reason:
                    _log.info("this trainer rank's GPU memory is not published by every transport: %s", reason)
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
                shelf = PublishedRegion(self.layout.regions[0] if self.layout.regions else 0, self.layout.digest)
                owned.callback(shelf.close)
                self._region_address = shelf.address
                self.region, self._placer = shelf, HostPublisher(self.manifest, shards, self.layout, shelf.address)
                self._publish(shelf, "host", transports, local_host, network, owned)
            self._owned = owned.pop_all()

    def _publish(
        self,
        region: PublishedRegion | CudaRegion,
        memory: Memory,
        transports: Sequence[Transport],
        local_host: Host,
        network: Network,
        owned: ExitStack,
    ) -> str:
        """Publish ``region`` by those that read its ``memory``. Returns why some cannot; raises it for memory of the host."""
        publishers, reason = publish_region(region, memory, transports, self.key, local_host, network, owned)
        self._publishers += publishers
        return reason

    @property
    def key(self) -> bytes:
        """What readers of this rank must know."""
        return self._key.reveal()

    @property
    def live(self) -> bool:
        """Whether the trainer's own memory is read: then only between :meth:`arm` and :meth:`disarm`, and never later."""
        return self._live is not None

    @property
    def offers(self) -> tuple[Offer, ...]:
        """How engine ranks reach the shards, in the order of the transports given."""
        return tuple(publisher.offer for publisher in self._publishers)

    def arm(self, number: int | None) -> Placing:
        """Allow version ``number`` to be placed (``None``: the one that the coordinator chooses).

        The trainer's thread stands still in ``publish`` from here to :meth:`disarm`.

        The answer is set when the copy is complete, so that the trainer may change its memory again.
        """
        self._follow()
        self._stop[0] = 0
        self._last = None  # of an earlier attempt at this number, perhaps: a publication means the weights of now
        self._placing = Placing()
        self._armed = _ANY if number is None else number
        return self._placing

    def _follow(self) -> None:
        """Take up the shards where they are now: a framework may have given parameters other memory since the last time."""
        if self._followed is None:
            return
        manifest, shards = self._followed.now()
        if shards is self._shards:
            return
        layout = packed_layout(manifest, shards)
        if manifest.fingerprint != self.manifest.fingerprint or layout.digest != self.layout.digest:
            raise ConfigurationError(
                "this trainer rank holds other tensors or shards than when it was made: make a new weightsync.Trainer"
            )
        self._shards = shards
        self._placer = HostPublisher(manifest, shards, layout, self._region_address)

    def disarm(self) -> None:
        """Stop a placing that runs, and refuse any that comes later. On return nothing reads the trainer's memory any more.

        Where it is :attr:`live`, a reader whose launch is still running then (its rank did not even answer to quarantine within
        the grace) learns so when it checks, and discards what it has.
        """
        self._armed = None
        self._stop[0] = 1
        if not self._busy.acquire(timeout=_PLACING_SECONDS):  # a placing looks at the flag every few hundred KiB
            raise DeadlineExceeded(
                f"a placing did not stop within {_PLACING_SECONDS:g} s (a hung device?): this rank's weights may still be read"
            )
        try:
            if self._live is not None:
                self._live.withdraw()
        finally:
            self._busy.release()

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator. Raises :class:`~weightsync.errors.Aborted` if that number is not being published."""
        if isinstance(body, Place):
            failpoints.reached("trainer.received.place")
            self.epoch = body.epoch
            return self._place(body.number, Deadline(timeout))
        return Done()

    def _place(self, number: int, deadline: Deadline) -> Placed:
        with self._busy:
            if self._last is not None and self.region.version == number:
                return self._last  # asked again, by a coordinator that restarted: a number always means the same bytes
            if self._armed not in (number, _ANY):
                raise Aborted(f"this trainer rank is not publishing version {number} (any more)")
            failpoints.reached("trainer.place")
            started = time.perf_counter()
            with span("wait"):
                wait_for_devices(self._shards, deadline)  # for what the trainer queued before it called publish, in whatever stream
            with self.region.placing(number):
                with span("digest" if self.live else "copy"):
                    digests = self._placer.place(self._stop, deadline)
                failpoints.reached("trainer.placing")
                if self._stop[0]:
                    raise Aborted(f"placing version {number} was aborted by the trainer")
            self._armed, self._placing.number = None, number
            self._last = Placed(digests=digests.astype("<u8").tobytes(), seconds=time.perf_counter() - started)
            self._placing.set()
            failpoints.reached("trainer.placed")
            return self._last

    def close(self) -> None:
        """Stop serving and free the shelf. Safe twice."""
        self.disarm()
        self._owned.close()


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
