"""N-dimensional half-open region of a checkpoint tensor."""

from __future__ import annotations

from math import prod

import msgspec


class Box(msgspec.Struct, frozen=True):
    """Region ``starts <= index < stops`` of a tensor, one entry for each dimension, in elements. The box of a scalar is ``()``.

    Used for single boxes in messages, tests and adapters. A :class:`~weightsync.model.layout.Layout` stores thousands of boxes as
    columns.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Box of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension, in elements."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the region in a tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Return whether this is a region of a tensor of ``shape``."""
        return len(self.starts) == len(self.stops) == len(shape) and all(
            0 <= start <= stop <= extent for start, stop, extent in zip(self.starts, self.stops, shape, strict=True)
        )
