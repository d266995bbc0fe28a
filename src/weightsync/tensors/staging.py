"""The ring of buckets into which streamed delivery reads whole tensors, and from which the engine's own loader takes them."""

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

__all__ = ["Staging", "check_size"]

_BUFFERS = 2

Buffer = npt.NDArray[np.uint8] | torch.Tensor


def check_size(manifest: Manifest, layout: Layout, bucket_bytes: int) -> None:
    """Raise :class:`~weightsync.errors.LayoutError` for a staging layout that takes more memory than this rank's own settings say.

    A layout comes over the wire: a bucket has at most ``bucket_bytes``, or the bytes of the largest tensor if that is more, and
    there are no more buckets than tensors.
    """
    most = max([bucket_bytes, *(spec.nbytes for spec in manifest)])
    if any(size > most for size in layout.regions) or len(layout.regions) > len(layout):
        raise LayoutError(
            f"the plan asks for {len(layout.regions)} buckets of up to {max([*layout.regions, 0]):,} bytes for {len(layout)} rows; "
            f"this engine rank allows {most:,} bytes a bucket"
        )


class Staging:
    """Memory for a staging ``layout`` (region ``k`` is bucket ``k``, each row a whole tensor): few buffers, whatever the buckets.

    Bucket ``k`` lies in buffer ``k % buffers``, so with two of them one can be filled while the one before it is being loaded. A
    buffer is as large as the largest bucket that it will hold. They are allocated (and in host memory touched) at once,
    page-aligned and private, on ``device`` (``None``: in host memory). Raises :class:`~weightsync.errors.LayoutError` for rows that
    are not whole, contiguous tensors. ``nbytes`` is what it costs.
    """

    def __init__(self, manifest: Manifest, layout: Layout, *, device: torch.device | None = None, buffers: int = _BUFFERS) -> None:
        self._manifest, self._layout = manifest, layout
        self._check()
        self.buckets = len(layout.regions)
        self.device = device
        self.buffers = min(buffers, self.buckets) if max([*layout.regions, 0]) else 0
        sizes = [max(layout.regions[index :: self.buffers]) for index in range(self.buffers)]
        self._buffers: list[Buffer] = [_allocate(size) if device is None else _on(device, size) for size in sizes]
        self.nbytes = sum(sizes)
        starts = [one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data for one in self._buffers] or [0]
        self.addresses: tuple[int, ...] = tuple(starts[bucket % len(starts)] for bucket in range(self.buckets))
        """Base address of each region."""
        order = np.argsort(layout.region, kind="stable")
        edges = np.searchsorted(layout.region[order], np.arange(self.buckets + 1))
        self._rows = [order[first:last].tolist() for first, last in pairwise(edges)]
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def tensors(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of everything in ``bucket``: views of the staging memory, valid until its buffer is filled again.

        Tensors without elements are never sent; they come with bucket 0, as a loader may look for every name. The views are made
        once, as making them takes longer than filling them on a GPU.
        """
        if not 0 <= bucket < max(self.buckets, 1):
            raise LayoutError(f"bucket {bucket} of {self.buckets}")
        if bucket not in self._views:
            self._views[bucket] = self._look(bucket)
        return list(self._views[bucket])

    def _look(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        if bucket == 0:
            found += [
                (spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device))
                for spec in self._manifest
                if not spec.size
            ]
        for row in self._rows[bucket] if self._rows else ():
            spec = self._manifest[int(self._layout.tensor[row])]
            first = int(self._layout.offset[row])
            memory = self._buffers[bucket % self.buffers][first : first + spec.nbytes]
            flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
            found.append((spec.name, flat.view(torch_dtype(spec.dtype)).view(spec.shape)))
        return found

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that ``stream`` writes this memory too, so that nobody else gets it before that stream is done with it."""
        for one in self._buffers:
            if isinstance(one, torch.Tensor):
                one.record_stream(stream)

    def close(self) -> None:
        """Let go of the memory; it is freed with the last tensor that still looks at it."""
        self._buffers = []
        self._rows = []
        self._views = {}
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


def _on(device: torch.device, size: int) -> torch.Tensor:
    """Memory of a device, which torch aligns to 512 bytes. Raises LayoutError if there is not enough."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise LayoutError(f"no room for a staging buffer of {size:,} bytes on {device}: give a smaller bucket_bytes") from error


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """Page-aligned memory, already backed by pages: the first round must not pay for faults while engines are paused."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(0)
    return array
