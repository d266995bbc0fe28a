"""What the ranks of :mod:`tests.unit.coordinator.fakes` hold: small tensors, their layouts, and digests of versions' bytes."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from weightsync.model import Layout, Manifest, TensorSpec

SPECS = (TensorSpec("a", (4, 4), "uint8"), TensorSpec("b", (6,), "uint8"), TensorSpec("c", (2, 3), "uint8"))
MANIFEST = Manifest(SPECS)
STREAMED = Manifest(TensorSpec(f"t{number}", (3,), "uint8") for number in range(8))
"""What a trainer with windows streams, a tensor in each."""


@functools.lru_cache(maxsize=256)
def rows_layout(manifest: Manifest, part: int, parts: int) -> Layout:
    """Every tensor split into ``parts`` along its first real dimension; this is part number ``part``."""
    tensor, starts, stops, offset, strides, used = [], [], [], [], [], 0
    for index, spec in enumerate(manifest):
        axis = manifest.dims - len(spec.shape)
        extent = spec.shape[0]
        first, last = extent * part // parts, extent * (part + 1) // parts
        if first == last or not spec.size:
            continue
        start, stop = [0] * manifest.dims, list(manifest.shapes[index])
        start[axis], stop[axis] = first, last
        sizes = [b - a for a, b in zip(start, stop, strict=True)]
        tensor.append(index)
        starts.append(start)
        stops.append(stop)
        offset.append(used)
        strides.append([int(np.prod(sizes[d + 1 :])) for d in range(manifest.dims)])
        used += int(np.prod(sizes))
    rows, dims = len(tensor), manifest.dims
    return Layout(
        manifest,
        np.array(tensor, np.int32),
        np.array(starts, np.int64).reshape(rows, dims),
        np.array(stops, np.int64).reshape(rows, dims),
        np.zeros(rows, np.int32),
        np.array(offset, np.int64),
        np.array(strides, np.int64).reshape(rows, dims),
        (used,),
    )


@functools.lru_cache(maxsize=256)
def _elements(digest: str) -> tuple[npt.NDArray[np.uint64], ...]:
    layout = _known[digest]
    found = []
    for row in range(len(layout)):
        ranges = [np.arange(a, b) for a, b in zip(layout.starts[row], layout.stops[row], strict=True)]
        grid = np.zeros((), np.int64)
        for values in ranges:
            grid = grid[..., None] * 100 + values
        found.append((grid.ravel() + 10000 * int(layout.tensor[row])).astype(np.uint64))
    return tuple(found)


_known: dict[str, Layout] = {}


def row_digests(layout: Layout, content: npt.NDArray[np.int64], key: bytes = b"") -> npt.NDArray[np.uint64]:
    """An additive digest by position, of rows filled with the bytes of versions ``content``, under a key if there is one."""
    _known[layout.digest] = layout
    sums = np.zeros(len(layout), np.uint64)
    for row, elements in enumerate(_elements(layout.digest)):
        values = (elements * np.uint64(3) + np.uint64(int(content[row]) + 2) * np.uint64(17)) % np.uint64(251)
        sums[row] = np.sum(values * (elements * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(int.from_bytes(key[:8])) | np.uint64(1)))
    return sums


def streamed_digest(number: int, content: int) -> int:
    """Of tensor ``number`` of :data:`STREAMED`, as version ``content``."""
    return int(row_digests(rows_layout(STREAMED, 0, 1), np.full(len(STREAMED), content, np.int64))[number])
