"""Loader that copies whole tensors into shards. On a CUDA device each batch is one launch, whatever the strides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from weightsync.errors import LoadError
from weightsync.tensors.copy_table import tiles_between
from weightsync.tensors.shards import Shard, bits_of

if TYPE_CHECKING:
    from weightsync.tensors.cuda.copies import TileCopy

_MOST_TABLES = 4096
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class ShardLoader:
    """Copies each rank's parts of whole tensors into ``shards``, bit for bit. Several shards may belong to one tensor.

    On a CUDA device with Triton a batch is one launch. Its table is built on first use and kept for later batches of the same
    tensors in the same memory, as every round of a streamed update brings them. Elsewhere torch copies. Make a new loader when a
    shard moves to other memory. Work goes to the device's current stream. Not thread-safe.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards: dict[str, list[Shard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, []).append(shard)
        self._copies: dict[Hashable, TileCopy] = {}
        self.table_bytes = 0
        """Device memory of the tables, in bytes."""

    def load(self, batch: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's part of each whole tensor in ``batch`` into the shards of the same name.

        On a CUDA device this returns before the bytes have moved.

        Raises:
            LoadError: No shard has the tensor's name, or the tensor differs from it in dtype or whole shape.
        """
        pairs = tuple(batch)
        names, tensors = tuple(name for name, _ in pairs), [tensor for _, tensor in pairs]
        # Cached, because slicing tens of thousands of tensors takes longer than copying them.
        pointers, strides = tuple(map(torch.Tensor.data_ptr, tensors)), tuple(map(torch.Tensor.stride, tensors))
        key = (names, pointers, tuple(map(_shape, tensors)), strides, tuple(map(_dtype, tensors)))
        copy = self._copies.get(key)
        if copy is not None:
            copy.launch()
            return
        targets, sources = self._parts(names, tensors)
        devices = {tensor.device for tensor in (*targets, *sources)}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda" and find_spec("triton") is not None:
            copy = self._build(targets, sources, device)
            self._copies[key] = copy
            copy.launch()
        elif targets:
            # As integers, because torch's batched copy goes through float32, which changes the bits of a NaN.
            torch._foreach_copy_([bits_of(tensor) for tensor in targets], [bits_of(tensor) for tensor in sources])

    def _parts(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for name, tensor in zip(names, tensors, strict=True):
            shards = self._shards.get(name, [])
            if not shards and tensor.numel():  # tensors without elements have no shards
                raise LoadError(f"this engine rank has no parameter named {name!r}")
            for shard in shards:
                if tensor.dtype != shard.tensor.dtype or tuple(tensor.shape) != tuple(shard.shape):
                    came = f"{tensor.dtype}{list(tensor.shape)}"
                    raise LoadError(f"{name} is {shard.tensor.dtype}{list(shard.shape)} in this engine, but arrived as {came}")
                if shard.tensor.numel():
                    targets.append(shard.tensor)
                    sources.append(tensor[shard.box.slices] if shard.box.shape != shard.shape else tensor)
        return targets, sources

    def _build(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], device: torch.device) -> TileCopy:
        from weightsync.tensors.cuda.copies import TileCopy

        if len(self._copies) >= _MOST_TABLES:
            self._copies.clear()
            self.table_bytes = 0
        copy = TileCopy([[(tiles_between(targets, sources), [0])]], device)
        self.table_bytes += copy.table_bytes
        return copy
