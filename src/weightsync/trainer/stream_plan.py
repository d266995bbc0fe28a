"""Where the tensors of a stream go: planned when they come for the first time, only compared when the same stream comes again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.model.window import ALIGNMENT, StreamedTensors, WindowPart, measured, window_layout
from weightsync.publishing.copied_shards import chunks
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.shards import DTypes, dtype_name, published_dtype, torch_dtype


def published_spec(dtype: DTypes, name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return what is published of a whole tensor. Raises :class:`~weightsync.errors.ConfigurationError` if that cannot be."""
    own = tensor.dtype
    kind = dtype.get(name, own) if isinstance(dtype, Mapping) else published_dtype(dtype, own)
    return TensorSpec(name, tuple(tensor.shape), dtype_name(kind))


class PlannedPart(NamedTuple):
    """A tensor, or a part of one larger than a window, and where it goes.

    ``box`` is ``None`` for a whole tensor. ``target`` is a view of this rank's memory with the part's shape and published dtype;
    ``None`` if another rank sends it, or if it has no bytes.
    """

    window: int
    part: WindowPart
    box: tuple[slice, ...] | None
    target: torch.Tensor | None


class _PlannedTensor(NamedTuple):
    name: str
    shape: torch.Size
    dtype: torch.dtype
    """The tensor's own, before it is converted."""
    parts: tuple[PlannedPart, ...]


@dataclass(frozen=True, eq=False)
class WindowRing:
    """The windows of one trainer rank, which it fills one after the other, again and again.

    All ranks cut the same tensors into the same windows. Each copies only its own: those whose number is its rank, modulo the world
    size.
    """

    memory: torch.Tensor
    """``uint8[windows * capacity]``, on the host or a CUDA device."""
    capacity: int
    """Bytes from one window to the next."""
    rank: int
    world_size: int
    dtype: DTypes
    """What to convert to; see :class:`weightsync.Trainer`."""

    def own(self, window: int) -> bool:
        """Whether this rank sends a window."""
        return window % self.world_size == self.rank

    def offset(self, window: int) -> int:
        """Bytes from the beginning of this rank's memory to one of its windows."""
        return window // self.world_size * self.capacity % len(self.memory)


class WindowContents:
    """What is in a full window of this rank, whose memory is ``memory``, ``offset`` bytes from the beginning of the region."""

    def __init__(self, parts: tuple[WindowPart, ...], nbytes: int, memory: torch.Tensor, offset: int) -> None:
        self.parts, self.nbytes, self.offset = parts, nbytes, offset
        self._memory = memory

    @cached_property
    def _described(self) -> tuple[Manifest, Layout, list[int], tuple[int, ...]]:
        return *window_layout(self.parts, self.nbytes), (self._memory.data_ptr(),)

    @cached_property
    def _on_device(self) -> LayoutDigest:
        manifest, layout, _, address = self._described
        return LayoutDigest(manifest, layout, address, self._memory.device)

    def digests(self, deadline: Deadline) -> UInt64:
        """Digest the parts, in their order, of what the memory holds now: on a device, after the current stream's work."""
        manifest, layout, order, address = self._described
        digests = np.zeros(len(self.parts), np.uint64)
        if not self._memory.is_cuda:
            rows = np.zeros(len(layout), np.uint64)
            digest_rows(manifest, layout, address, 0, len(layout), rows)
            digests[order] = rows
            return digests
        self._on_device.launch()
        wait_for_device(self._memory.device, deadline, "digesting a window of the stream")
        digests[order] = self._on_device.taken()
        return digests


class StreamPlan:
    """Tensors of a stream in their order, cut into windows of at most ``most`` bytes, as all trainer ranks cut them.

    Grows while a stream comes for the first time. A stream that differs from the previous stream is planned again from
    its first difference. After an error it must be dropped. Used by the thread that iterates; :class:`WindowContents` by another.
    """

    def __init__(self, ring: WindowRing, most: int) -> None:
        self.most, self._ring = most, ring
        self._planned: list[_PlannedTensor] = []
        self._contents: dict[int, WindowContents] = {}
        self._manifest: Manifest | None = None
        # What comes next continues here:
        self._tensors = StreamedTensors()
        self._window = self._used = 0
        self._parts: list[WindowPart] = []  # of the window

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The CUDA stream of digests."""
        return torch.cuda.Stream(self._ring.memory.device)  # type: ignore[no-untyped-call]

    def parts(self, index: int, name: str, tensor: torch.Tensor) -> tuple[PlannedPart, ...]:
        """Where tensor number ``index`` of the stream goes.

        Raises:
            ConfigurationError: Its dtype cannot be published, or a window holds no element of it.
            ManifestMismatch: The stream brought a tensor of this name already.
        """
        if index < len(self._planned):
            kept = self._planned[index]
            if kept.name == name and kept.dtype is tensor.dtype and kept.shape == tensor.shape:
                return kept.parts
        if index < len(self._planned) or self._manifest is not None:
            self._continue_after(index)
        parts = self._plan(name, tensor)
        self._planned.append(_PlannedTensor(name, tensor.shape, tensor.dtype, parts))
        return parts

    def cut(self, count: int) -> None:
        """The stream has only ``count`` tensors: drop the plan of the rest."""
        if count < len(self._planned):
            self._continue_after(count)

    def contents(self, window: int) -> WindowContents:
        """Return the contents of a full window of this rank."""
        if window not in self._contents:
            offset = self._ring.offset(window)
            memory = self._ring.memory[offset : offset + self._ring.capacity]
            self._contents[window] = WindowContents(tuple(self._parts), self._used, memory, offset)
        return self._contents[window]

    def end(self) -> Manifest:
        """All tensors, when all have come."""
        if self._manifest is None:
            self._manifest, _ = self._tensors.end()
            self._tensors = StreamedTensors()
        return self._manifest

    def _continue_after(self, count: int) -> None:
        del self._planned[count:]
        self._manifest, self._tensors = None, StreamedTensors()
        parts = [planned for tensor in self._planned for planned in tensor.parts]
        self._tensors.add_window(measured(tuple(planned.part for planned in parts)), [0] * len(parts))
        self._window = parts[-1].window if parts else 0
        self._parts = [planned.part for planned in parts if planned.window == self._window]
        self._used = self._parts[-1].offset + self._parts[-1].nbytes if parts else 0
        self._contents = {number: contents for number, contents in self._contents.items() if number < self._window}

    def _plan(self, name: str, tensor: torch.Tensor) -> tuple[PlannedPart, ...]:
        spec = published_spec(self._ring.dtype, name, tensor)
        dtype = torch_dtype(spec.dtype)
        if spec.nbytes <= self.most:
            return (self._placed(spec, dtype, None),)
        if dtype.itemsize > self.most:
            raise ConfigurationError(f"a window of {self.most} bytes holds no element of {name}")
        parts = []
        for box in chunks(spec.shape, self.most // dtype.itemsize):
            self._advance()
            parts.append(self._placed(spec, dtype, box))
        return tuple(parts)

    def _placed(self, spec: TensorSpec, dtype: torch.dtype, box: tuple[slice, ...] | None) -> PlannedPart:
        starts, stops = tuple(cut.start for cut in box or ()), tuple(cut.stop for cut in box or ())
        extents = spec.shape if box is None else tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        nbytes = prod(extents) * dtype.itemsize
        offset = -(-self._used // ALIGNMENT) * ALIGNMENT
        if offset + nbytes > self.most:
            self._advance()
            offset = 0
        part = WindowPart(spec.name, spec.shape, spec.dtype, offset, starts, stops)
        self._tensors.add_window(measured((part,)), [0])
        self._parts.append(part)
        self._used = offset + nbytes
        target = None
        if nbytes and self._ring.own(self._window):
            first = self._ring.offset(self._window) + offset
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # kept for others
                target = self._ring.memory[first : first + nbytes].view(dtype).view(extents)
        return PlannedPart(self._window, part, box, target)

    def _advance(self) -> None:
        """Begin the next window, unless this one is empty."""
        if not self._parts:
            return
        if self._ring.own(self._window):
            self.contents(self._window)
        self._window, self._used, self._parts = self._window + 1, 0, []
