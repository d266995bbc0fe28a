"""The shards of one rank in a region that readers reach.

On a CUDA device these are the shards themselves (:mod:`weightsync.publishing.in_place`) or, where they are converted or cannot be
shared, a copy on that device (:mod:`weightsync.publishing.device_copy`). Elsewhere it is a copy in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.arrays import Int8, UInt64
from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, TransportUnavailable
from weightsync.protocol.tokens import is_loopback
from weightsync.publishing.device_copy import PART_BYTES, DeviceCopy, room_for_copy
from weightsync.publishing.host_copy import HostPublisher
from weightsync.publishing.in_place import InPlacePublisher, obstacle_to_in_place
from weightsync.publishing.listed_changes import DeviceLists, HostLists, ListedChanges
from weightsync.publishing.publication import Publication, ReaderAccess
from weightsync.spans import span
from weightsync.tensors.device_memory import device_of, wait_for_devices
from weightsync.tensors.digest import DigestConstants, digest_rows
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.quantization import AllMax, ChooseFormats, QuantizedShards
from weightsync.tensors.shards import DTypes, FollowedShards, Shard, ShardedState
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.cuda.pinned import Pinned
from weightsync.transports.cuda.region import OwnCudaRegion
from weightsync.transports.host.region import PublishedRegion
from weightsync.transports.hostinfo import own_address, reachable_address
from weightsync.transports.registry import transports_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardOptions:
    """What is published of a state, and how. See :class:`weightsync.Trainer`."""

    dtype: DTypes = None
    include_buffers: bool = False
    deltas: bool | int = False
    quantize: ChooseFormats | None = None


PLAIN = ShardOptions()


class PublishedShards(Publication):
    """Holds the region of one rank and publishes it by every transport given that reads its memory.

    ``state`` is a module or a state dict whose tensors are plain (held whole) or DTensors.

    Where all shards are on one CUDA device and nothing is converted, that memory itself is published (:attr:`in_place`) by those
    transports that read CUDA memory and can reach it, and costs nothing more. If something is converted, or the memory cannot be
    shared, a copy on that device is published by the same transports, where it fits. Without these transports the shards are copied
    to a region of host memory, published by those that read host memory. A copy has this rank's shards in the published dtype,
    quantized if ``quantize`` chooses formats for tensors of the manifest, and lives as long as the object. Raises what
    :func:`~weightsync.tensors.shards.shards_of` and
    :class:`~weightsync.transports.host.region.PublishedRegion` raise, :class:`~weightsync.errors.TransportUnavailable` if no
    transport can publish the shards, and :class:`~weightsync.errors.ConfigurationError` if one cannot encrypt where it must.

    Not thread-safe, except that another thread may set ``stop[0]`` of a :meth:`placing` that runs.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        access: ReaderAccess,
        options: ShardOptions = PLAIN,
        all_max: AllMax | None = None,
    ) -> None:
        super().__init__(access)
        self._deltas, transports = options.deltas, access.transports
        self.changes: ListedChanges | None = None
        """What lists the changes from one version to the next, if ``deltas`` asks for it and there is memory."""
        followed = FollowedShards(state, dtype=options.dtype, include_buffers=options.include_buffers)
        self.manifest, shards = followed.now()
        if not self.manifest.nbytes:
            raise ConfigurationError("this rank's state holds no bytes: give the module, or a state dict with tensors")
        self._masters = shards
        self.quantized: QuantizedShards | None = None
        """What quantizes matrices while they are placed."""
        if options.quantize is not None:
            self.quantized = QuantizedShards(self.manifest, shards, options.quantize(self.manifest), all_max)
            self.manifest, shards = self.quantized.manifest, self.quantized.shards
        self._write = None if self.quantized is None else self.quantized.write
        self._shards: list[Shard] = []
        self._placer: HostPublisher | InPlacePublisher | DeviceCopy
        with ExitStack() as owned:
            reason = obstacle_to_in_place(self.manifest, shards, transports)
            self._live = None if reason else InPlacePublisher(self.manifest, state, shards, options.deltas)
            if self._live is not None:
                owned.callback(self._live.close)
                reason = self._publish(self._live.region, "cuda", owned)
                if not self._publishers:
                    owned.close()
                    self._live = None
                elif reason:
                    _log.info("this rank's GPU memory is not published by every transport: %s", reason)
            # Memory that is read in place is looked for at every placing, and must not be kept here: a trainer may offload it.
            self._followed = None if self._live is not None else followed
            if self._live is not None:
                self.layout, self.region, self._placer = self._live.layout, self._live.region, self._live
                self.changes = self._live.changes
                if self._live.no_changes is not None:
                    _log.warning("this rank publishes no deltas, but whole versions: %s", self._live.no_changes)
            else:
                self._shards = shards
                self.layout = packed_layout(self.manifest, shards)
                no_copy = self._copy_on_device(owned)
                if no_copy is not None:
                    self._copy_on_host("; ".join(filter(None, (reason, no_copy))), owned)
            self._owned = owned.pop_all()

    def _copy_on_device(self, owned: ExitStack) -> str | None:
        """Publish a copy on the device of the shards. Return why that is not possible, ``None`` if it is.

        The reason is empty if the shards are not on a GPU, or no transport reads GPU memory.
        """
        device, nbytes = device_of(self._masters), sum(self.layout.regions)
        transports = self._access.transports
        if device is None or device.type != "cuda" or not any("cuda" in transport.traits.reads for transport in transports):
            return ""
        reason, changes = room_for_copy(nbytes, device), None
        if reason is None and self._deltas:
            changes = DeviceLists(self.manifest, self.layout, self._deltas, 0, nbytes, device)
            no_room = room_for_copy(changes.end + changes.working_bytes + PART_BYTES, device)
            if self._write is not None:
                no_room = "quantized weights are not compared on a GPU"
            if no_room is not None:
                _log.warning("this rank publishes no deltas, but whole versions: %s", no_room)
                changes = None
        with ExitStack() as undo:
            if reason is None:
                region = OwnCudaRegion(nbytes if changes is None else changes.end, self.layout.digest, device)
                undo.callback(region.close)
                if changes is not None:
                    changes.use(region.memory)
                placer = DeviceCopy(self.manifest, self._shards, self.layout, region, self._write, changes)
                reason = self._publish(region, "cuda", undo)
            if not self._publishers:
                _log.warning("this rank's shards are copied to host memory: %s", reason)
                return reason
            owned.push(undo.pop_all())
        if reason:
            _log.info("this rank's copy in GPU memory is not published by every transport: %s", reason)
        self._placer, self.region, self.changes = placer, region, changes
        return None

    def _copy_on_host(self, reason: str, owned: ExitStack) -> None:
        transports = self._access.transports
        if transports and not any("host" in transport.traits.reads for transport in transports):
            names = ", ".join(transport.name for transport in transports)
            raise TransportUnavailable(
                f"{names} cannot be used: {reason}. Allow shared_memory or tcp too, which read a copy in host memory"
            )
        nbytes = self.layout.regions[0] if self.layout.regions else 0
        changes = HostLists(self.manifest, self.layout, self._deltas) if self._deltas else None
        region = PublishedRegion(nbytes if changes is None else changes.end, self.layout.digest)
        owned.callback(region.close)
        self.changes = changes
        self._region_address = region.address
        self.region = region
        self._placer = HostPublisher(self.manifest, self._shards, self.layout, region.address, self._write)
        if (device := next((shard.tensor.device for shard in self._shards if shard.tensor.is_cuda), None)) is not None:
            try:  # the GPU writes to pinned memory as fast as its bus allows, several times as fast as to other memory
                owned.callback(Pinned(region.payload, device).close)
            except TransportUnavailable as error:
                _log.info("copying to this region will be slow: %s", error)
        self._publish(region, "host", owned)

    @property
    def changed_shares(self) -> dict[str, float]:
        """The part of the words of each tensor that the last version changed, where that is listed."""
        return {} if self.changes is None else self.changes.shares

    @property
    def in_place(self) -> bool:
        """Whether the rank's own memory is read, and not a copy."""
        return self._live is not None

    def masters(self) -> Sequence[Shard]:
        """Return the rank's shards as they are now, before a conversion. Raises as :meth:`follow` does."""
        self.follow()
        return self._masters

    def follow(self) -> None:
        """Take up the shards where they are now: a framework may have given parameters other memory since the last time.

        Raises:
            ConfigurationError: The shards are others than before.
        """
        if self._followed is None:
            return
        manifest, masters = self._followed.now()
        if masters is self._masters:
            return
        shards = masters
        if self.quantized is not None:
            shards, manifest = self.quantized.derive(manifest, masters), self.quantized.manifest
        layout = packed_layout(manifest, shards)
        if manifest.fingerprint != self.manifest.fingerprint or layout.digest != self.layout.digest:
            raise ConfigurationError(
                "this rank holds other tensors or shards than when it was made: make a new weightsync.Trainer or weightsync.Engine"
            )
        if isinstance(self.region, OwnCudaRegion):
            changes = self.changes if isinstance(self.changes, DeviceLists) else None
            self._placer = DeviceCopy(manifest, shards, layout, self.region, self._write, changes)
        else:
            self._placer = HostPublisher(manifest, shards, layout, self._region_address, self._write)
        self._shards = shards
        self._masters = masters  # last: a signal handler may raise anywhere in here, and then all of this is done again

    def release(self) -> None:
        """Keep none of the shards' memory alive until :meth:`follow`, where they are copied: a trainer may offload it."""
        if self._followed is not None:
            self._followed.release()

    @contextmanager
    def placing(self, number: int, stop: Int8, deadline: Deadline) -> Iterator[UInt64]:
        """Bring the shards as they are now into the region. Readers find version ``number`` if the block did not raise.

        Yields the digest of each row of the layout.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            DeadlineExceeded: ``deadline`` passed.
        """
        with span("wait"):
            wait_for_devices(self._masters, deadline)  # for what was queued before, in whatever stream
        if self.quantized is not None:
            with span("maxima"):
                self.quantized.exchange(deadline)
        with self.region.placing(number):
            with span("digest" if self.in_place else "copy"):
                digests = self._placer.place(stop, deadline)
            if isinstance(self.changes, HostLists) and isinstance(self.region, PublishedRegion):
                with span("changes"):
                    self.changes.update(self.region.payload, stop)
            yield digests

    def digests(self, constants: DigestConstants, stop: Int8, deadline: Deadline) -> UInt64:
        """Digest what readers find in the region now, with ``constants``.

        Returns:
            The digest of each row of the layout, ``uint64[rows]``.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            DeadlineExceeded: ``deadline`` passed, in GPU memory.
        """
        if not isinstance(self._placer, HostPublisher):
            return self._placer.digests(constants, deadline)
        digests = np.zeros(len(self.layout), np.uint64)
        digest_rows(self.manifest, self.layout, (self._region_address,), 0, len(digests), digests, constants, stop)
        if stop[0]:
            raise Aborted("the digest of this version was stopped")
        return digests

    def withdraw(self) -> None:
        """See :meth:`Publication.withdraw`."""
        if self._live is not None:
            self._live.withdraw()
        else:
            super().withdraw()


def publishing_transports(given: Sequence[Transport | str] | None, network: Network) -> tuple[Transport, ...]:
    """The transports by which a rank publishes, where it is reached as ``network`` says. See :func:`transports_for`."""
    return transports_for(given, not is_loopback(network.address) if network.encrypt is None else network.encrypt)


def network_of(settings: ClientSettings) -> Network:
    """Where readers of other hosts reach this one, if the coordinator can be reached from there."""
    where = own_address(settings.data_host) if settings.data_host is not None else None
    if where is None and not is_loopback(settings.coordinator.host):
        where = reachable_address(settings.coordinator.host, settings.coordinator.port)
    return Network(where or LOOPBACK.address, None if settings.data_encryption is None else settings.data_encryption == "on")
