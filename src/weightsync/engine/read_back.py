"""The digests of an engine's parameters themselves, after its loader filled them, where they are whole, plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.arrays import Int32, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import LayoutError
from weightsync.model import Box, Layout, Manifest
from weightsync.tensors.device_memory import DeviceDigest, device_of
from weightsync.tensors.digest import PUBLIC, DigestConstants, digest_rows
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import Shard, Views


@dataclass(frozen=True, eq=False)
class ParameterMemory:
    """Where an engine's parameters were when they were looked for, on which CUDA device, and how they are read."""

    layout: Layout
    addresses: tuple[int, ...]
    device: torch.device | None
    """``None`` for host memory."""
    views: Views
    parts: Sequence[tuple[str, Box]] = ()
    """Name and box of each, of parameters whose memory may get others: the addresses alone do not tell."""


class ReadBack:
    """Where the parameters are, and how to digest them: made once, and again when they are other memory or another view of it.

    Used by one thread at a time.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._views: Views | None = None
        self._part = 0  # the first shard that is not whole
        self._memory: ParameterMemory | None = None
        self._digest: DeviceDigest | None = None

    def look(self, shards: Sequence[Shard] | None) -> bool:
        """Whether ``shards`` can be read back as what a trainer publishes: all of them whole, and none of another dtype."""
        if shards is None or (self._part < len(shards) and not _whole(shards[self._part])):
            return False  # perhaps as it was the last time, which takes no further look
        tensors = [shard.tensor for shard in shards]
        if self._views is None or not self._views.are_of(tensors):
            self._views, self._digest = Views(tensors), None
            self._memory = self._find(shards, self._views)
        return self._memory is not None

    def _find(self, shards: Sequence[Shard], views: Views) -> ParameterMemory | None:
        device = device_of(shards)
        self._part = next((index for index, shard in enumerate(shards) if not _whole(shard)), len(shards))
        if device is None or device.type not in ("cpu", "cuda") or self._part < len(shards):
            return None
        try:
            layout, addresses = layout_in_place(self._manifest, shards, block_bytes=None)
        except LayoutError:
            return None
        return ParameterMemory(layout, addresses, device if device.type == "cuda" else None, views)

    def build(self) -> None:
        """Make the tables for a device now, rather than in the first round."""
        memory = self._memory
        if memory is not None and memory.device is not None and self._digest is None:
            self._digest = DeviceDigest(self._manifest, memory.layout, memory.device)
            self._digest.build(memory.addresses)

    def digests(
        self, shards: Sequence[Shard] | None, deadline: Deadline, constants: DigestConstants = PUBLIC
    ) -> tuple[Int32, UInt64] | None:
        """The manifest indices of all tensors in ``shards`` and their digests; ``None`` where they cannot be read back."""
        memory = self._memory if self.look(shards) else None
        if memory is None or len(np.unique(memory.layout.tensor)) != len(memory.layout):
            return None
        return memory.layout.tensor, self._take(memory, deadline, constants)

    def _take(self, memory: ParameterMemory, deadline: Deadline, constants: DigestConstants) -> UInt64:
        rows = len(memory.layout)
        digests = np.zeros(rows, np.uint64)
        if not rows:
            return digests
        self.build()
        if self._digest is not None:
            return self._digest.take(memory.addresses, deadline, constants)  # of what a loader queued, in whatever stream
        digest_rows(self._manifest, memory.layout, memory.addresses, 0, rows, digests, constants)
        return digests


def _whole(shard: Shard) -> bool:
    return shard.box == Box.whole(shard.shape)
