"""Staging buckets, into which streamed delivery reads whole tensors and from which the engine's loader takes them."""

from __future__ import annotations

import contextlib
import mmap
from itertools import pairwise

import numpy as np
import torch

from weightsync.arrays import Bytes
from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.tensors.shards import torch_dtype

_BUFFERS = 2

Buffer = Bytes | torch.Tensor


def check_size(manifest: Manifest, layout: Layout, bucket_bytes: int) -> None:
    """Check that a staging layout from the wire respects this rank's own settings.

    A bucket may have ``bucket_bytes``, or the bytes of the largest tensor if that is more. There may be no more buckets than rows.

    Raises:
        LayoutError: The layout needs more memory.
    """
    most = max([bucket_bytes, *(spec.nbytes for spec in manifest)])
    if any(size > most for size in layout.regions) or len(layout.regions) > len(layout):
        raise LayoutError(
            f"the plan asks for {len(layout.regions)} buckets of up to {max([*layout.regions, 0]):,} bytes for {len(layout)} rows; "
            f"this engine rank allows {most:,} bytes a bucket"
        )


class Staging:
    """Memory for a staging ``layout`` (region ``k`` is bucket ``k``, each row a whole tensor), with a fixed number of buffers.

    Bucket ``k`` lies in buffer ``k % buffers``. With two buffers, one can be filled while the previous one is loaded. A buffer is
    as large as the largest bucket that it will hold. Buffers are allocated at once (and touched, in host memory), page-aligned and
    private, on ``device`` (``None`` for host memory). ``nbytes`` is their total size. ``free`` is how much host memory there is.

    Raises:
        LayoutError: A row is not a whole, contiguous tensor, or memory is short.
    """

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        *,
        device: torch.device | None = None,
        buffers: int = _BUFFERS,
        free: int | None = None,
    ) -> None:
        self._manifest, self._layout = manifest, layout
        self._check()
        self.buckets = len(layout.regions)
        self.device = device
        self.buffers = min(buffers, self.buckets) if max([*layout.regions, 0]) else 0
        sizes = [max(layout.regions[index :: self.buffers]) for index in range(self.buffers)]
        self.nbytes = sum(sizes)
        if device is None:
            check_free(self.nbytes, free)
        self._buffers: list[Buffer] = [staging_buffer(size, device) for size in sizes]
        starts = [buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer.ctypes.data for buffer in self._buffers] or [0]
        self.addresses: tuple[int, ...] = tuple(starts[bucket % len(starts)] for bucket in range(self.buckets))
        """Base address of each region."""
        order = np.argsort(layout.region, kind="stable")
        edges = np.searchsorted(layout.region[order], np.arange(self.buckets + 1))
        self._rows = [order[first:last].tolist() for first, last in pairwise(edges)]
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def tensors(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of everything in ``bucket``, as views of the staging memory, valid until its buffer is filled again.

        Tensors without elements are never sent. They come with bucket 0, because a loader may expect every name. The views are
        cached, because making them takes longer than filling them on a GPU.

        Raises:
            LayoutError: The bucket does not exist.
        """
        if not 0 <= bucket < max(self.buckets, 1):
            raise LayoutError(f"bucket {bucket} does not exist; there are {self.buckets}")
        if bucket not in self._views:
            self._views[bucket] = self._look(bucket)
        return list(self._views[bucket])

    def _look(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        tensors: list[tuple[str, torch.Tensor]] = []
        if bucket == 0:
            tensors += [
                (spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device))
                for spec in self._manifest
                if not spec.size
            ]
        for row in self._rows[bucket] if self._rows else ():
            spec = self._manifest[int(self._layout.tensor[row])]
            first = int(self._layout.offset[row])
            memory = self._buffers[bucket % self.buffers][first : first + spec.nbytes]
            flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
            tensors.append((spec.name, flat.view(torch_dtype(spec.dtype)).view(spec.shape)))
        return tensors

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Record that ``stream`` uses this memory, so that torch does not reuse it before that stream has finished."""
        for buffer in self._buffers:
            if isinstance(buffer, torch.Tensor):
                buffer.record_stream(stream)

    def close(self) -> None:
        """Drop the buffers. Their memory is freed with the last tensor that views it."""
        self._buffers = []
        self._rows = []
        self._views = {}
        self.buckets = 0

    def _check(self) -> None:
        layout, manifest = self._layout, self._manifest
        if np.any(layout.stops - layout.starts != manifest.shapes[layout.tensor]):
            raise LayoutError("a staging layout holds whole tensors only")
        if np.any(layout.offset % np.maximum(manifest.itemsizes[layout.tensor], 1)):
            raise LayoutError("a tensor in a staging layout is not aligned to its elements")
        if not layout.contiguous(manifest):
            raise LayoutError("a tensor in a staging layout is not contiguous")


def staging_buffer(size: int, device: torch.device | None, free: int | None = None) -> Buffer:
    """Allocate ``size`` bytes on ``device``, which torch aligns to 512 bytes.

    ``None`` stands for private, page-aligned host memory, of which ``free`` bytes are left. It is touched, so that the first round
    causes no page faults while engines are paused.

    Raises:
        LayoutError: Memory is short.
    """
    if device is not None:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise LayoutError(
                f"no memory for a staging buffer of {size:,} bytes on {device}: use a smaller bucket_bytes"
            ) from error
    check_free(size, free)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without huge pages it is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(0)
    return array


def check_free(size: int, free: int | None) -> None:
    """Refuse what the operating system would end this process for, once it is touched."""
    if free is not None and size > free:
        raise LayoutError(
            f"no memory for staging buffers of {size:,} bytes: {free:,} are available. Use a smaller bucket_bytes or "
            "staging_buckets=1, or raise the memory limit of the container"
        )
