"""Publishes a trainer rank's GPU memory in place: without a copy, so it is readable only until ``publish`` returns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from weightsync.arrays import Int8, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import LayoutError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.publishing.device_copy import room_for_copy
from weightsync.publishing.listed_changes import DeviceLists
from weightsync.tensors.changes import Sections
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.cuda.waiting import wait_until_idle
from weightsync.tensors.device_memory import DeviceDigest, Form, device_of, forms_of, layout_by_shard
from weightsync.tensors.digest import DigestConstants
from weightsync.tensors.shards import Shard, ShardedState, checkpoint_name, dtype_name
from weightsync.transports.base import Transport
from weightsync.transports.cuda.pinned import Pinned
from weightsync.transports.cuda.region import PLACING_SECONDS, CudaRegion, OwnMemory
from weightsync.transports.host.memory import available_bytes
from weightsync.transports.host.region import EMPTY

_log = logging.getLogger(__name__)
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
        with ExitStack() as undo:
            undo.callback(self._free)
            if deltas:
                self._keep(manifest, deltas)
            sizes = self.layout.regions if self._lists is None else (*self.layout.regions, self._lists.nbytes)
            self.region = CudaRegion(sizes, self.layout.digest, self._regions, device.index)
            undo.pop_all()
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

    def place(self, stop: Int8 | None = None, deadline: Deadline | None = None) -> UInt64:
        """Digest every row of the layout, after all work that was queued on the device.

        Called within ``region.placing``, which has looked where the memory is. One launch, so ``stop`` cannot end it early. Raises
        :class:`~weightsync.errors.DeadlineExceeded` (without a ``deadline``, after a minute).
        """
        deadline = deadline or Deadline(PLACING_SECONDS)
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


def _local(state: Mapping[str, torch.Tensor] | torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's memory of each tensor, as the state holds it now."""
    state = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    values = {checkpoint_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not torch.distributed.is_available():
        return values
    from torch.distributed.tensor import DTensor

    with torch.no_grad():  # which to_local looks at: entered once, as a model has tens of thousands
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in values.items()}
