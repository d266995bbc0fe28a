"""A window of a stream: whole tensors, or a part of one larger than a window, in consecutive memory.

Each window comes from one trainer rank. If the ranks' tensors have drifted apart, the version would be a mixture of them. So every
rank digests a sample of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Annotated, Generic, TypeVar

import msgspec
import numpy as np

from weightsync.arrays import UInt64
from weightsync.errors import LayoutError, ManifestMismatch
from weightsync.model.box import Box
from weightsync.model.dtypes import itemsize
from weightsync.model.layout import Layout, packed_strides, padded_boxes
from weightsync.model.manifest import MAX_NAME, Manifest, TensorSpec

Known = TypeVar("Known")

ALIGNMENT = 256
"""Every tensor begins at a multiple of this many bytes of its window."""

_Extents = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]


class WindowPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a window, ``offset`` bytes from its beginning, contiguous.

    ``starts`` and ``stops`` are the box that is in the window; both are empty for a whole tensor.
    """

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    shape: _Extents
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    offset: int
    starts: _Extents = ()
    stops: _Extents = ()

    def check(self) -> None:
        """Check what was received; a name, shape or dtype that is impossible is left to the manifest.

        Raises:
            LayoutError: The box or the offset is impossible.
        """
        boxes = len(self.starts) == len(self.stops) and len(self.stops) in (0, len(self.shape))
        if not boxes or self.offset < 0 or self.offset % ALIGNMENT or min(self.shape, default=0) < 0:
            raise LayoutError("a part of a window has an impossible offset, shape or box")
        if self.stops and any(not 0 <= a < b <= extent for a, b, extent in zip(self.starts, self.stops, self.shape, strict=False)):
            raise LayoutError("a part of a window lies outside its tensor")

    @property
    def whole(self) -> bool:
        """Whether the window holds the whole tensor."""
        return not self.stops

    @property
    def box(self) -> Box:
        """The box that is in the window."""
        return Box.whole(self.shape) if self.whole else Box(self.starts, self.stops)

    @property
    def spec(self) -> TensorSpec:
        """The whole tensor."""
        return TensorSpec(self.name, self.shape, self.dtype)

    @property
    def size(self) -> int:
        """Elements in the window."""
        return prod(self.shape) if self.whole else self.box.size

    @property
    def nbytes(self) -> int:
        """Bytes in the window."""
        return self.size * itemsize(self.dtype)


def window_layout(parts: tuple[WindowPart, ...], nbytes: int, *, assembled: bool = False) -> tuple[Manifest, Layout, list[int]]:
    """Manifest and layout of a window of ``nbytes`` bytes, and the index in ``parts`` of each row of the layout.

    Parts without elements have no row. With ``assembled``, a part of a tensor lies in region 1, the memory of the whole tensor;
    everything else lies in region 0, the window.

    Raises:
        LayoutError: A part is impossible or reaches past the window, or the window holds parts of two tensors.
        ConfigurationError: A name, shape or dtype is impossible, or a name occurs twice.
    """
    for part in parts:
        part.check()
    manifest = Manifest(part.spec for part in parts)
    order = sorted((index for index, part in enumerate(parts) if part.size), key=lambda index: manifest.index[parts[index].name])
    rows, dims = len(order), manifest.dims
    tensor = np.array([manifest.index[parts[index].name] for index in order], np.int32)
    starts, stops = padded_boxes([parts[index].box for index in order], dims)
    extents = stops - starts
    region, offset = np.zeros(rows, np.int32), np.zeros(rows, np.int64)
    regions = [nbytes]
    for row, index in enumerate(order):
        part = parts[index]
        if part.whole or not assembled:
            offset[row] = part.offset
            continue
        if len(regions) > 1:
            raise LayoutError("a window holds parts of two tensors")
        regions.append(part.spec.nbytes)
        region[row], extents[row] = 1, manifest.shapes[tensor[row]]
    strides = packed_strides(extents, manifest.itemsizes[tensor])
    offset[region == 1] = (starts * strides).sum(axis=1)[region == 1]
    return manifest, Layout(manifest, tensor, starts, stops, region, offset, strides, tuple(regions)), order


_manifest = lru_cache(maxsize=2)(Manifest)
"""Cached, because it takes 6 us a tensor, and the next stream, or another reader in this process, mostly has the same tensors."""


Measured = tuple[tuple[WindowPart, TensorSpec, int, int], ...]
"""Parts of a window that were checked, with the tensor, elements and bytes of each."""


def measured(parts: tuple[WindowPart, ...]) -> Measured:
    """Check the parts of a window, and measure them."""
    for part in parts:
        part.check()
    return tuple((part, part.spec, part.size, part.nbytes) for part in parts)


class KnownWindows(Generic[Known]):
    """Caches ``work(parts, nbytes)`` by window number: consecutive streams have mostly the same windows.

    Args:
        work: Called with the parts and the bytes of a window that is not known. Its results must not be changed.
    """

    def __init__(self, work: Callable[[tuple[WindowPart, ...], int], Known]) -> None:
        self._work = work
        self._known: dict[int, tuple[tuple[WindowPart, ...], int, Known]] = {}

    def get(self, number: int, parts: tuple[WindowPart, ...], nbytes: int) -> Known:
        """Return the result for window ``number``, from the cache if its parts did not change. Raises what ``work`` raises."""
        known = self._known.get(number)
        if known is None or known[:2] != (parts, nbytes):
            known = self._known[number] = (parts, nbytes, self._work(parts, nbytes))
        return known[2]

    def end(self, windows: int) -> None:
        """A stream of so many windows has ended: drop others."""
        for number in [number for number in self._known if number >= windows]:
            del self._known[number]


class StreamedTensors:
    """The tensors of a stream as they come, and their digests, which add up over the parts of a tensor."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all parts so far."""
        self._specs: dict[str, TensorSpec] = {}
        self._left: dict[str, int] = {}
        self._digests: dict[str, int] = {}

    def add_window(self, parts: Measured, digests: Iterable[int]) -> None:
        """Take note of the parts of a window, which were checked, and of their digests.

        Raises:
            ManifestMismatch: A tensor came already, or as another one.
        """
        for (part, spec, size, nbytes), digest in zip(parts, digests, strict=True):
            name = part.name
            known = self._specs.get(name)
            self.nbytes += nbytes
            if known is None:
                self._specs[name], self._digests[name] = spec, digest
                self._left[name] = 0 if part.whole else spec.size - size
            elif known != spec or not size or size > self._left[name]:
                raise ManifestMismatch(f"the stream brings {name} twice, or as two different tensors")
            else:
                self._left[name] -= size
                self._digests[name] = (self._digests[name] + digest) % 2**64

    def complete(self, name: str) -> bool:
        """Whether all parts of this tensor came."""
        return not self._left[name]

    def end(self) -> tuple[Manifest, UInt64]:
        """The manifest of the stream, and the digest of each of its tensors.

        Raises:
            ManifestMismatch: A tensor did not come whole.
        """
        torn = [name for name, left in self._left.items() if left]
        if torn:
            raise ManifestMismatch(f"the stream ended in the middle of {torn[0]}")
        manifest = _manifest(tuple(self._specs.values()))
        return manifest, np.array([self._digests[spec.name] for spec in manifest], np.uint64)


_FIRST = 16
_PERIOD = 16
_BYTES = 64 << 10


def is_sampled(index: int, number: int) -> bool:
    """Whether tensor ``index`` of the stream is sampled in version ``number``.

    The first sixteen always are. Of the others it is every sixteenth, another sixteenth in each version.
    """
    return index < _FIRST or (index + number) % _PERIOD == 0


def sample_box(shape: tuple[int, ...], itemsize: int, number: int) -> tuple[slice, ...]:
    """Box of at most 64 KiB of a tensor. It moves on every sixteen versions, so each element's turn comes."""
    most, turn, box = max(_BYTES // itemsize, 1), number // _PERIOD, []
    size = prod(shape)  # of the box, if the dimensions from here on are whole
    for extent in shape:
        step = extent
        if size > most:
            rest = size // extent
            step = max(most // rest, 1)
            size = step * rest
        turn, part = divmod(turn, -(-extent // step) if step else 1)
        box.append(slice(part * step, min((part + 1) * step, extent)))
    return tuple(box)
