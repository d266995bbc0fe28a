"""A trainer rank's GPU memory published where it is: no copy, so readable only while ``publish`` stands still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import LayoutError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.tensors.device_memory import DeviceDigest, Form, device_of, forms_of, layout_by_shard
from weightsync.tensors.shards import Shard, ShardedState, checkpoint_name, dtype_name
from weightsync.transports.base import Transport
from weightsync.transports.cuda.region import PLACING_SECONDS, CudaRegion
from weightsync.transports.host.region import EMPTY

__all__ = ["InPlacePublisher", "obstacle_to_in_place"]

State = Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState


def obstacle_to_in_place(manifest: Manifest, shards: Sequence[Shard], transports: Sequence[Transport]) -> str | None:
    """Why these shards must be copied to a host region instead of being read in place, or ``None`` if they need not be.

    Does not look at whether a transport can share this memory; its ``publish`` raises if not.
    """
    if not any("cuda" in transport.traits.reads for transport in transports):
        return "no transport that reads GPU memory is among this trainer's transports"
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
    """

    def __init__(self, manifest: Manifest, state: State, shards: Sequence[Shard]) -> None:
        device = device_of(shards)
        if device is None or device.type != "cuda":
            raise TransportUnavailable("shards that are not all on one CUDA device cannot be read in place")
        self._state = state
        self._device = device
        self._names = [shard.name for shard in shards if shard.box.size]
        self._first: list[Form] = forms_of([shard.tensor for shard in shards if shard.box.size])
        self._held: list[torch.Tensor] = []
        self._now: tuple[int, ...] = ()
        self.layout: Layout = layout_by_shard(manifest, shards)
        self._digest = DeviceDigest(manifest, self.layout, device)
        self._digest.build(self._look())
        self.region = CudaRegion(self.layout.regions, self.layout.digest, self._look, device.index)
        self._held = []

    def _look(self) -> tuple[int, ...]:
        """Where every shard is now. Keeps the tensors until :meth:`withdraw`, so that their memory is not reused meanwhile."""
        held = _local(self._state, self._names)
        forms = forms_of(held)
        if forms != self._first:
            number = next(i for i, (before, now) in enumerate(zip(self._first, forms, strict=True)) if before != now)
            (shape, strides, dtype, device), now = self._first[number], forms[number]
            raise LayoutError(
                f"{self._names[number]} was {dtype} of local shape {list(shape)} and strides {list(strides)} on {device} when this "
                f"rank joined, and is now {now[2]} of {list(now[0])} and {list(now[1])} on {now[3]}: make a new "
                "weightsync.Trainer or weightsync.Engine"
            )
        self._held = held
        self._now = tuple(tensor.data_ptr() for tensor in held)
        return self._now

    def place(self, stop: npt.NDArray[np.int8] | None = None, deadline: Deadline | None = None) -> npt.NDArray[np.uint64]:
        """The digest of every row of the layout, of what the device's memory holds after all that was queued on it.

        Called within ``region.placing``, which has looked where the memory is. One launch, so ``stop`` cannot end it early. Raises
        :class:`~weightsync.errors.DeadlineExceeded` (without a ``deadline``, after a minute).
        """
        return self._digest.take(self._now, deadline or Deadline(PLACING_SECONDS))

    def withdraw(self) -> None:
        """The trainer is about to change its memory: readers that are still at it find out and fail. Safe to repeat."""
        if self.region.version != EMPTY:
            self.region.withdraw()
        self._held = []


def _local(state: State, names: Sequence[str]) -> list[torch.Tensor]:
    """This rank's memory of each of ``names``, as the state holds it now."""
    if isinstance(state, ShardedState):
        return [shard.tensor for shard in state.declare()[1]]
    state = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    values = {checkpoint_name(name): value for name, value in state.items()}
    missing = [name for name in names if name not in values]
    if missing:
        raise LayoutError(f"{missing[0]} ({len(missing)} in all) is no longer in the state that this trainer was made with")
    if not torch.distributed.is_available():
        return [values[name] for name in names]
    from torch.distributed.tensor import DTensor

    with torch.no_grad():  # which to_local looks at: entered once, as a model has tens of thousands
        tensors = (values[name] for name in names)
        return [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
