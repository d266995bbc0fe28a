"""The ring of two buckets into which streamed delivery reads whole tensors, and from which the engine's own loader takes them."""

from __future__ import annotations

import contextlib
import mmap
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.tensors.shards import torch_dtype

__all__ = ["Staging"]

_BUFFERS = 2


class Staging:
    """Memory for a staging ``layout`` (region ``k`` is bucket ``k``, each row a whole tensor): two buffers, whatever the buckets.

    Bucket ``k`` lies in buffer ``k % 2``, so one can be filled while the one before it is being loaded. The buffers are
    allocated and touched at once, page-aligned and private. Raises :class:`~weightsync.errors.LayoutError` for rows that are not
    whole, contiguous tensors. ``nbytes`` is what it costs.
    """

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._manifest, self._layout = manifest, layout
        self._check()
        self.buckets = len(layout.regions)
        size = max([*layout.regions, 0])
        count = min(_BUFFERS, self.buckets) if size else 0
        self._buffers = [_allocate(size) for _ in range(count)]
        self.nbytes = size * count
        self.addresses: tuple[int, ...] = tuple(
            self._buffers[bucket % _BUFFERS].ctypes.data if count else 0 for bucket in range(self.buckets)
        )
        """Base address of each region."""
        order = np.argsort(layout.region, kind="stable")
        edges = np.searchsorted(layout.region[order], np.arange(self.buckets + 1))
        self._rows = [order[first:last].tolist() for first, last in pairwise(edges)]

    def tensors(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of everything in ``bucket``: views of the staging memory, valid until the bucket after next is read.

        Tensors without elements are never sent; they come with bucket 0, as a loader may look for every name.
        """
        if not 0 <= bucket < max(self.buckets, 1):
            raise LayoutError(f"bucket {bucket} of {self.buckets}")
        found: list[tuple[str, torch.Tensor]] = []
        if bucket == 0:
            found += [
                (spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))) for spec in self._manifest if not spec.size
            ]
        for row in self._rows[bucket] if self._rows else ():
            spec = self._manifest[int(self._layout.tensor[row])]
            first = int(self._layout.offset[row])
            memory = self._buffers[bucket % _BUFFERS][first : first + spec.nbytes]
            found.append((spec.name, torch.from_numpy(memory).view(torch_dtype(spec.dtype)).view(spec.shape)))
        return found

    def close(self) -> None:
        """Let go of the memory; it is freed with the last tensor that still looks at it."""
        self._buffers = []
        self._rows = []
        self.buckets = 0

    def _check(self) -> None:
        layout, manifest = self._layout, self._manifest
        extents = layout.stops - layout.starts
        if np.any(extents != manifest.shapes[layout.tensor]):
            raise LayoutError("a staging layout holds whole tensors only")
        close = manifest.itemsizes[layout.tensor]
        if np.any(layout.offset % np.maximum(close, 1)):
            raise LayoutError("a tensor in a staging layout is not aligned to its elements")
        for dim in range(manifest.dims - 1, -1, -1):
            if np.any((layout.strides[:, dim] != close) & (extents[:, dim] > 1)):
                raise LayoutError("a tensor in a staging layout is not contiguous")
            close = close * extents[:, dim]


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """Page-aligned memory, already backed by pages: the first round must not pay for faults while engines are paused."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(0)
    return array
