"""The digest straight from its definition, sharing nothing with the package, and random odd layouts to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from weightsync.model.layout import Layout
from weightsync.model.manifest import Manifest, TensorSpec

__all__ = ["Held", "box_digest", "hold", "random_boxes"]

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_COLUMNS = np.array([(_splitmix64((1 << 63) + j) & 0xFFFFFFFF) | 1 for j in range(4096)], np.uint64)


def box_digest(values: npt.NDArray[np.uint8], shape: tuple[int, ...], itemsize: int, starts: list[int], stops: list[int]) -> int:
    """The digest of one box of a tensor given as bytes, ``uint8[..., L * itemsize]`` (global, C order)."""
    width = (shape[-1] if shape else 1) * itemsize
    rows = values.reshape(-1, width)
    blocks = -(-width // 16384)
    leading = np.indices([stop - start for start, stop in zip(starts[:-1], stops[:-1], strict=True)] or [1])
    first = starts[:-1] or [0]
    extents = shape[:-1] or (1,)
    indices = np.ravel_multi_index(tuple(axis.ravel() + start for axis, start in zip(leading, first, strict=True)), extents)
    low, high = (starts[-1] * itemsize, stops[-1] * itemsize) if shape else (0, itemsize)
    total = 0
    for r in indices.tolist():
        line = np.zeros(-(-width // 4) * 4, np.uint8)
        line[low:high] = rows[r, low:high]
        words = line.view("<u4").astype(np.uint64)
        for block in range(low // 16384, (high - 1) // 16384 + 1):
            part = words[4096 * block : 4096 * (block + 1)]
            with np.errstate(over="ignore"):
                inner = int((part * _COLUMNS[: len(part)]).sum(dtype=np.uint64))
            total += inner * (_splitmix64(r * blocks + block) | 1)
    return total & _MASK


@dataclass
class Held:
    """Boxes of one tensor laid out in a buffer: the layout, the bytes to put there, and what each row's digest must be."""

    manifest: Manifest
    layout: Layout
    memory: npt.NDArray[np.uint8]
    digests: list[int]
    whole: int


def random_boxes(random: np.random.Generator, shape: tuple[int, ...], cuts: int) -> list[tuple[list[int], list[int]]]:
    """A partition of a tensor of ``shape`` into boxes, by ``cuts`` random splits."""
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(cuts):
        starts, stops = boxes.pop(int(random.integers(len(boxes))))
        wide = [d for d in range(len(shape)) if stops[d] - starts[d] > 1]
        if not wide:
            boxes.append((starts, stops))
            continue
        dim = int(random.choice(wide))
        at = int(random.integers(starts[dim] + 1, stops[dim]))
        boxes.append((starts, [*stops[:dim], at, *stops[dim + 1 :]]))
        boxes.append(([*starts[:dim], at, *starts[dim + 1 :]], stops))
    return boxes


def hold(
    random: np.random.Generator, shape: tuple[int, ...], dtype: str, itemsize: int, cuts: int, permute: bool, shift: int
) -> Held:
    """Boxes of a random tensor, one after the other, ``shift`` bytes past alignment, dimensions permuted in memory at will."""
    manifest = Manifest([TensorSpec("t", shape, dtype)])
    whole = random.integers(0, 256, prod(shape) * itemsize, np.uint8)
    values = whole.reshape(*shape, itemsize)
    dims = max(1, len(shape))
    boxes = random_boxes(random, shape, cuts)
    starts, stops, offsets, strides, parts, digests = [], [], [], [], [], []
    offset = shift
    for low, high in boxes:
        part = values[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        order = random.permutation(len(shape)).tolist() if permute else list(range(len(shape)))
        packed = np.ascontiguousarray(part.transpose([*order, len(shape)]))
        stride = np.zeros(dims, np.int64)
        for place, dim in enumerate(order):
            stride[dims - len(shape) + dim] = packed.strides[place]
        starts.append(low or [0])
        stops.append(high or [1])
        offsets.append(offset)
        strides.append(stride)
        parts.append((offset, packed.reshape(-1)))
        digests.append(box_digest(whole, shape, itemsize, low or [0], high or [1]))
        offset += packed.size + int(random.choice([0, 1, 2, 4, 16])) * (shift > 0)
    memory = random.integers(0, 256, offset, np.uint8)
    for at, data in parts:
        memory[at : at + data.size] = data
    layout = Layout(
        manifest,
        np.zeros(len(boxes), np.int32),
        np.array(starts, np.int64),
        np.array(stops, np.int64),
        np.zeros(len(boxes), np.int32),
        np.array(offsets, np.int64),
        np.array(strides, np.int64).reshape(len(boxes), dims),
        (len(memory),),
    )
    return Held(manifest, layout, memory, digests, box_digest(whole, shape, itemsize, [0] * dims, list(shape) or [1]))
