"""The shards of one rank in a region that readers reach.

On a CUDA device these are the shards themselves, in place: without a copy, so readable only until ``publish`` returns. Where they
are converted or cannot be shared, it is a copy on that device; elsewhere a copy in host memory
(:mod:`weightsync.publishing.copied_shards`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.arrays import Int8, UInt64
from weightsync.closing import OnFailure
from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, LayoutError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.protocol.tokens import is_loopback
from weightsync.publishing.copied_shards import PART_BYTES, DeviceCopy, HostPublisher
from weightsync.publishing.listed_changes import DeviceLists, HostLists
from weightsync.publishing.publication import Publication, ReaderAccess
from weightsync.spans import span
from weightsync.tensors.changes import Sections
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.cuda.waiting import wait_until_idle
from weightsync.tensors.device_memory import (
    DeviceDigest,
    Form,
    device_of,
    forms_of,
    layout_by_shard,
    room_for_copy,
    wait_for_devices,
)
from weightsync.tensors.digest import DigestConstants, digest_rows
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.quantization import AllMax, ChooseFormats, QuantizedShards
from weightsync.tensors.shards import DTypes, FollowedShards, Shard, ShardedState, checkpoint_name, dtype_name, local_part
from weightsync.transports.base import LOOPBACK, Network, Transport
from weightsync.transports.cuda.pinned import Pinned
from weightsync.transports.cuda.region import CudaRegion, OwnCudaRegion, OwnMemory
from weightsync.transports.host.memory import available_bytes
from weightsync.transports.host.region import EMPTY, PublishedRegion
from weightsync.transports.hostinfo import own_address, reachable_address
from weightsync.transports.registry import transports_for

_RESERVE = 4 << 30  # bytes of host memory that stay free, because what is pinned cannot be taken back when memory runs short

State = Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState


def obstacle_to_in_place(manifest: Manifest, shards: Sequence[Shard], transports: Sequence[Transport]) -> str | None:
    """Why these shards must be copied to a host region instead of being read in place, or ``None`` if they need not be.

    Does not look at whether a transport can share this memory; its ``publish`` raises if not.
    """
    if not any("cuda" in transport.traits.reads for transport in transports):
        return "no transport that reads GPU memory is among this trainer's transports"
    if any(shard.tensor.is_meta for shard in shards):
        return "weights are quantized, which takes a copy"
    device = device_of(shards)
    if device is None or device.type != "cuda":
        return "the shards of this rank are not all on one CUDA device"
    for shard in shards:
        published = manifest[manifest.index[shard.name]].dtype
        if dtype_name(shard.tensor.dtype) != published:
            return f"{shard.name} is {dtype_name(shard.tensor.dtype)} and published as {published}, which takes a copy"
    return None


class InPlacePublisher:
    """Publishes shards that lie on one CUDA device without moving them: "placing" is only taking their digests.

    Every placing reads ``state`` again, so a parameter that was given other memory since (of the same shape, strides
    and dtype) is published where it is now.

    With ``deltas`` (see :class:`~weightsync.publishing.listed_changes.ListedChanges`), a copy of the last version is kept on the
    device, or in host memory, and changes are listed in one more region; :attr:`no_changes` says why not.
    """

    def __init__(self, manifest: Manifest, state: State, shards: Sequence[Shard], deltas: bool | int = False) -> None:
        device = device_of(shards)
        if device is None or device.type != "cuda":
            raise TransportUnavailable("shards that are not all on one CUDA device cannot be read in place")
        self._device = device
        self._live = LiveShards(state, shards)
        self._held: list[torch.Tensor] = []
        self._now: tuple[int, ...] = ()
        self.layout: Layout = layout_by_shard(manifest, shards)
        self._digest = DeviceDigest(manifest, self.layout, device)
        self._digest.build(self._look())
        self.changes: DeviceLists | None = None
        self.no_changes: str | None = None
        self._lists: OwnMemory | None = None
        self._pinned: Pinned | None = None
        with OnFailure(self._free):
            if deltas:
                self._keep(manifest, deltas)
            sizes = self.layout.regions if self._lists is None else (*self.layout.regions, self._lists.nbytes)
            self.region = CudaRegion(sizes, self.layout.digest, self._regions, device.index)
        self._held = []

    def _keep(self, manifest: Manifest, deltas: bool | int) -> None:
        """Take memory for the last version and for lists: on the device, or host memory for the version if only lists fit there."""
        layout = self.layout
        changes = DeviceLists(manifest, layout, deltas, len(layout.regions), 0, self._device)
        sections = changes.sections
        sizes = -(-sections.nbytes // 16) * 16
        self._before = np.cumsum(sizes) - sizes
        nbytes, beside = int(sizes.sum()), changes.end + changes.working_bytes
        no_room = room_for_copy(nbytes + beside, self._device)
        if no_room is None:
            self._last = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._before += self._last.data_ptr()
        else:
            self.no_changes = room_for_copy(beside, self._device) or self._keep_on_host(nbytes, sections, no_room)
        if self.no_changes is None:
            self._lists = OwnMemory(changes.end, self._device)
            changes.use(self._lists.tensor, on_host=self._pinned is not None)
            self.changes = changes

    def _keep_on_host(self, nbytes: int, sections: Sections, why: str) -> str | None:
        """Take pinned host memory for the last version. Returns why there is none."""
        if (free := available_bytes()) is not None and free - _RESERVE < nbytes:
            return f"{why}; of host memory {free:,} bytes are available, of which {_RESERVE:,} must stay free"
        try:
            self._pinned = Pinned(np.empty(nbytes, np.uint8), self._device)
        except TransportUnavailable as error:
            return f"{why}; {error}"
        _log.info("%s bytes of host memory hold the version before, and changes are found as fast as it is read: %s", nbytes, why)
        self._before += self._pinned.address
        # Copied now, because the kernel that finds everything changed reads it over the bus and writes it: 8 s for 61 GB.
        whole, once = sections.nbytes, np.ones(len(sections), np.int64)
        tiles = CopyTable(sections.region.astype(np.int32), sections.offset, whole, self._before, whole, once, whole)
        TileCopy([[(tiles, self._now)]], self._device).launch(0, 1)
        torch.cuda.synchronize(self._device)
        return None

    def _regions(self) -> tuple[int, ...]:
        addresses = self._look()
        return addresses if self._lists is None else (*addresses, self._lists.address)

    def _look(self) -> tuple[int, ...]:
        """Where every shard is now. Keeps the tensors until :meth:`withdraw`, so that their memory is not reused meanwhile."""
        self._held, self._now = self._live.look()
        return self._now

    def place(self, stop: Int8, deadline: Deadline) -> UInt64:
        """Digest every row of the layout, after all work that was queued on the device.

        Called within ``region.placing``, which has looked where the memory is. One launch, so ``stop`` cannot end it early. Raises
        :class:`~weightsync.errors.DeadlineExceeded`.
        """
        if self.changes is not None:
            wait_until_idle(self._device, deadline, f"waiting for work queued on {self._device} before looking for changes")
            addresses = np.array(self._now, np.int64)[self.changes.sections.region]
            with torch.cuda.device(self._device):
                self.changes.start(self._before, addresses)
                self.changes.launch(0, len(addresses))
                self.changes.finish(deadline)
        return self._digest.take(self._now, deadline)

    def digests(self, constants: DigestConstants, deadline: Deadline) -> UInt64:
        """Digest every row of what was placed last, with ``constants``, as :meth:`place` does."""
        return self._digest.take(self._now, deadline, constants)

    def withdraw(self) -> None:
        """The trainer is about to change its memory: readers that are still at it find out and fail. Safe to repeat."""
        if self.region.version != EMPTY:
            self.region.withdraw()
        self._held = []

    def close(self) -> None:
        """Withdraw, and free what was kept. Safe twice."""
        self.region.close()
        self._free()

    def _free(self) -> None:
        if self._lists is not None:
            self._lists.free()
        if self._pinned is not None:
            self._pinned.close()


class LiveShards:
    """Finds the memory of ``shards`` again, in the state that they were made from. Keeps no tensor of it.

    A shard that is a part of a tensor of the state (an expert of a packed parameter) is where that tensor is.
    """

    def __init__(self, state: State, shards: Sequence[Shard]) -> None:
        self._state = state
        self._tied: list[tuple[str, int]] = []
        """Other names of the same memory, each with the number of the tensor that it is."""
        shards = [shard for shard in shards if shard.box.size]
        if isinstance(state, ShardedState):
            self._names = [shard.name for shard in shards]
            tensors, owners = [shard.tensor for shard in shards], list(range(len(shards)))
        else:
            local = _local(state)
            names = [shard.owner or shard.name for shard in shards]
            self._names = list(dict.fromkeys(names))
            index = {name: number for number, name in enumerate(self._names)}
            tensors, owners = [local[name] for name in self._names], [index[name] for name in names]
            places = {_place(tensor): number for number, tensor in enumerate(tensors)}
            tied = [(name, places.get(_place(value))) for name, value in local.items() if value.numel() and name not in index]
            self._tied = [(name, number) for name, number in tied if number is not None]
        self._owners = np.array(owners, np.int64)
        starts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        self._offsets = np.array([shard.tensor.data_ptr() for shard in shards], np.int64) - starts[self._owners]
        self._first: list[Form] = forms_of(tensors)

    def look(self) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Return the tensors of the state that hold the shards, as they are now, and the address of each shard.

        Raises:
            LayoutError: A tensor is gone, or is read in another way than before.
        """
        if isinstance(self._state, ShardedState):
            held = [shard.tensor for shard in self._state.declare()[1]]
        else:
            local = _local(self._state)
            missing = [name for name in self._names if name not in local]
            if missing:
                raise LayoutError(f"{missing[0]} ({len(missing)} in all) is no longer in the state that this trainer was made with")
            held = [local[name] for name in self._names]
            for name, number in self._tied:
                if name not in local or _place(local[name]) != _place(held[number]):
                    raise LayoutError(
                        f"{name} and {self._names[number]} were the same memory when this rank joined, and are not any more: make "
                        "a new weightsync.Trainer or weightsync.Engine"
                    )
        forms = forms_of(held)
        if forms != self._first:
            number = next(i for i, (before, now) in enumerate(zip(self._first, forms, strict=True)) if before != now)
            (shape, strides, dtype, device), now = self._first[number], forms[number]
            raise LayoutError(
                f"{self._names[number]} was {dtype} of local shape {list(shape)} and strides {list(strides)} on {device} when this "
                f"rank joined, and is now {now[2]} of {list(now[0])} and {list(now[1])} on {now[3]}: make a new "
                "weightsync.Trainer or weightsync.Engine"
            )
        starts = np.array([tensor.data_ptr() for tensor in held], np.int64)
        return held, tuple((starts[self._owners] + self._offsets).tolist())


def _place(tensor: torch.Tensor) -> tuple[int, Form]:
    return tensor.data_ptr(), forms_of([tensor])[0]


@torch.no_grad()  # which a DTensor's to_local looks at: entered once, as a model has tens of thousands
def _local(state: Mapping[str, torch.Tensor] | torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's memory of each tensor, as the state holds it now."""
    state = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    return {checkpoint_name(name): local_part(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


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
        self.changes: HostLists | DeviceLists | None = None
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
            scratch = PART_BYTES if self._write is None else nbytes
            no_room = room_for_copy(changes.end + changes.working_bytes + scratch, device)
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
    def in_place(self) -> bool:
        """Whether the rank's own memory is read, and not a copy."""
        return self._live is not None

    @property
    def masters(self) -> Sequence[Shard]:
        """The rank's shards before a conversion, as :meth:`follow` last took them up."""
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
