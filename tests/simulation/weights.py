"""The simulated model: a few small tensors, what each version of them holds, and how ranks share them."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import numpy.typing as npt
import torch

from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.shards import Shard, torch_dtype

__all__ = ["MANIFEST", "MISFIT", "SPARSE", "Memory", "Sharing", "version_bytes"]

Sharing = str
"""``rows``: matrices are cut by rows, the rest is copied. ``copies``: ranks hold everything. ``parts``: nothing is held twice."""

MANIFEST = Manifest(
    (
        TensorSpec("embed.weight", (6, 4), "float32"),
        TensorSpec("layers.0.up", (4, 5), "bfloat16"),
        TensorSpec("layers.0.norm", (5,), "float32"),
        TensorSpec("layers.1.up", (3, 2, 3), "uint8"),
        TensorSpec("scale", (), "float32"),
    )
)

SPARSE = 1 << 30
_MOST_CONTENTS = 256

MISFIT = Manifest(
    TensorSpec(spec.name, spec.shape, "bfloat16" if spec.dtype == "float32" else spec.dtype, spec.aliases) for spec in MANIFEST
)
"""What an engine holds that forgot the dtype."""


@functools.lru_cache(maxsize=4096)
def version_bytes(number: int, salt: int) -> tuple[npt.NDArray[np.uint8], ...]:
    """What every tensor of a version holds, ``uint8[elements * itemsize]`` each; negative numbers are no version at all.

    If ``salt`` has :data:`SPARSE`, a version changes the first word of each tensor and a third of the others. One with an even
    number leaves two tensors as they were in the version with the number before.
    """
    draw = random.Random(number * 1_000_003 + (salt & ~SPARSE))
    values = tuple(np.frombuffer(draw.randbytes(spec.nbytes), np.uint8) for spec in MANIFEST)
    if not salt & SPARSE or number < 0:
        return values
    for index in range(1, 3):
        before = version_bytes(number - index, salt & ~SPARSE)
        values = tuple(_mixed(spec, new, old, number - index) for spec, new, old in zip(MANIFEST, values, before, strict=True))
    if number % 2 or not number:
        return values
    before, left = version_bytes(number - 1, salt), (number // 2 % len(MANIFEST), (number // 2 + 2) % len(MANIFEST))
    return tuple(before[index] if index in left else value for index, value in enumerate(values))


def _mixed(spec: TensorSpec, values: npt.NDArray[np.uint8], before: npt.NDArray[np.uint8], number: int) -> npt.NDArray[np.uint8]:
    """``values``, with the words that version ``number`` was the last to change as they were in it."""
    mixed, its = values.reshape(spec.size, -1).copy(), before.reshape(spec.size, -1)
    words = slice(number % 3 or 3, None, 3)
    mixed[words] = its[words]
    return mixed.reshape(-1)


def _box(spec: TensorSpec, rank: int, ranks: int, sharing: Sharing) -> Box | None:
    if sharing == "parts" and not spec.shape and rank:
        return None
    if sharing == "copies" or len(spec.shape) < (1 if sharing == "parts" else 2):
        return Box.whole(spec.shape)
    first, last = spec.shape[0] * rank // ranks, spec.shape[0] * (rank + 1) // ranks
    return Box((first, *(0 for _ in spec.shape[1:])), (last, *spec.shape[1:]))


class _Shape:
    """How one rank's parameters lie in one stretch of bytes."""

    def __init__(self, rank: int, ranks: int, sharing: Sharing) -> None:
        self.boxes = [_box(spec, rank, ranks, sharing) for spec in MANIFEST]
        parts = zip(self.boxes, MANIFEST, strict=True)
        self.sizes = [0 if box is None else box.size * spec.nbytes // max(spec.size, 1) for box, spec in parts]
        self.offsets = [0, *itertools.accumulate(-(-size // 16) * 16 for size in self.sizes)]
        self.nbytes = self.offsets[-1] or 16
        self._contents: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    def parts(self, storage: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in that stretch of bytes."""
        held = zip(MANIFEST, self.boxes, self.offsets, self.sizes, strict=False)
        return [
            storage[first : first + size].view(torch_dtype(spec.dtype)).view(box.shape)
            for spec, box, first, size in held
            if box is not None
        ]

    def content(self, number: int, salt: int) -> npt.NDArray[np.uint8]:
        """All bytes of version ``number``."""
        content = self._contents.get((number, salt))
        if content is None:
            if len(self._contents) >= _MOST_CONTENTS:
                self._contents.clear()
            content = self._contents[number, salt] = np.zeros(self.nbytes, np.uint8)
            values = version_bytes(number, salt)
            for index, (spec, box) in enumerate(zip(MANIFEST, self.boxes, strict=True)):
                first, size = self.offsets[index], self.sizes[index]
                if box is None:
                    continue
                begin = box.starts[0] * (spec.nbytes // spec.shape[0]) if spec.shape else 0
                content[first : first + size] = values[index][begin : begin + size]
        return content


_shape = functools.cache(_Shape)


class Memory:
    """One rank's parameters: views of one stretch of bytes."""

    def __init__(self, rank: int, ranks: int, sharing: Sharing) -> None:
        self._shape = shape = _shape(rank, ranks, sharing)
        self.storage = torch.zeros(shape.nbytes, dtype=torch.uint8)
        self.bytes: npt.NDArray[np.uint8] = self.storage.numpy()
        held = [(spec, box) for spec, box in zip(MANIFEST, shape.boxes, strict=True) if box is not None]
        parts = zip(held, shape.parts(self.storage), strict=True)
        self.shards = [Shard(spec.name, spec.shape, box, part) for (spec, box), part in parts]

    def expected(self, number: int, salt: int) -> bytes:
        """These bytes, were they all of version ``number``."""
        return self._shape.content(number, salt).tobytes()

    def fill(self, number: int, salt: int) -> None:
        """Make them all of version ``number``."""
        self.bytes[:] = self._shape.content(number, salt)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor, as an engine's loader does."""
        shard = next(shard for shard in self.shards if shard.name == name)
        index = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
        shard.tensor.copy_(tensor[index])
