"""Affine maps between the bytes of two memories, and their composition. Integer arithmetic only, no tensors.

A chain of copies is a composition of maps. The box of a checkpoint tensor behind a strided view is a map read in the digits of the
tensor's shape. Both use the same arithmetic: write positions in mixed radix, and split a map where it carries from one digit into
the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

_MOST_PARTS = 1 << 14

Dim = tuple[int, int, int]
"""Extent, and bytes between neighbors in the first and in the second memory."""


class Irregular(Exception):
    """A map splits into too many parts to follow."""


@dataclass(frozen=True)
class AffineMap:
    """Map of ``prod(extents)`` elements from one memory to another.

    The first element lies at byte ``src`` of the first memory and at byte ``dst`` of the second. Each of ``dims`` adds its
    steps. A step may be zero (the same element several times), never negative.
    """

    src: int
    dst: int
    dims: tuple[Dim, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(extent for extent, _, _ in self.dims)

    @cached_property
    def last(self) -> int:
        """Largest byte position in the first memory."""
        return self.src + sum((extent - 1) * step for extent, step, _ in self.dims)

    def folded(self) -> AffineMap:
        """Return the same map in the fewest dimensions, ordered by descending step in the first memory."""
        dims: list[Dim] = []
        for extent, src, dst in sorted((dim for dim in self.dims if dim[0] != 1), key=lambda dim: (-dim[1], -dim[2])):
            if dims and dims[-1][1] == extent * src and dims[-1][2] == extent * dst:
                extent *= dims.pop()[0]
            dims.append((extent, src, dst))
        return AffineMap(self.src, self.dst, tuple(dims))

    def swapped(self) -> AffineMap:
        """Return the inverse map."""
        return AffineMap(self.dst, self.src, tuple((extent, dst, src) for extent, src, dst in self.dims))

    def cut(self, dim: int, first: int, last: int) -> AffineMap:
        """Restrict one dimension to the indices ``first <= i < last``."""
        _, src, dst = self.dims[dim]
        dims = (*self.dims[:dim], (last - first, src, dst), *self.dims[dim + 1 :])
        return AffineMap(self.src + first * src, self.dst + first * dst, dims)

    def each(self, dim: int) -> Iterator[AffineMap]:
        """Yield one map for every index of a dimension.

        Raises:
            Irregular: The dimension has too many indices.
        """
        extent, src, dst = self.dims[dim]
        if extent > _MOST_PARTS:
            raise Irregular
        rest = self.dims[:dim] + self.dims[dim + 1 :]
        for index in range(extent):
            yield AffineMap(self.src + index * src, self.dst + index * dst, rest)


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbors in each dimension of a tensor in C order."""
    steps = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return tuple(steps)


@dataclass(frozen=True)
class _Aligned:
    """A map without carries: its first digits, and for each dimension the digit that it moves (-1 for none) and by how much."""

    map: AffineMap
    digits: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def _aligned(mapping: AffineMap, origin: int, steps: Sequence[int]) -> Iterator[_Aligned]:
    """Split ``map`` into parts without carries between the digits of ``steps`` (descending, each a multiple of the next)."""
    todo, parts = [mapping], 0
    while todo:
        parts += 1
        if parts > _MOST_PARTS:
            raise Irregular
        mapping_left = todo.pop()
        digits, rest = [], mapping_left.src - origin
        for step in steps:
            digit, rest = divmod(rest, step)
            digits.append(digit)
        places = [_place(dim[1], steps) for dim in mapping_left.dims]
        if rest:
            raise Irregular
        split = _split(mapping_left, digits, places, steps)
        if split is None:
            yield _Aligned(mapping_left, tuple(digits), tuple(places))
        else:
            todo += split[::-1]


def _place(step: int, steps: Sequence[int]) -> tuple[int, int]:
    if step == 0:
        return -1, 0
    for digit, each in enumerate(steps):
        if step % each == 0:
            return digit, step // each
    raise Irregular


def _split(
    mapping: AffineMap, digits: Sequence[int], places: Sequence[tuple[int, int]], steps: Sequence[int]
) -> list[AffineMap] | None:
    """Split ``map`` into parts with fewer carries; ``None`` if it has none."""
    for digit in range(len(steps) - 1, 0, -1):
        radix = steps[digit - 1] // steps[digit]
        mine = [dim for dim, (place, _) in enumerate(places) if place == digit]
        reach = {dim: places[dim][1] * (mapping.dims[dim][0] - 1) for dim in mine}
        if digits[digit] + sum(reach.values()) < radix:
            continue
        longest = max(mine, key=lambda dim: places[dim][1])
        extent, src, dst = mapping.dims[longest]
        step = places[longest][1]
        others = sum(reach.values()) - reach[longest]
        if digits[digit] + others < step and radix % step == 0:  # carries evenly at every ``period``-th index
            period = radix // step
            whole, rest = divmod(extent, period)
            dims = (*mapping.dims[:longest], (whole, src * period, dst * period), (period, src, dst), *mapping.dims[longest + 1 :])
            even = _without_unit_dims(AffineMap(mapping.src, mapping.dst, dims))
            return [even, _without_unit_dims(mapping.cut(longest, whole * period, extent))] if rest else [even]
        head = min(max((radix - 1 - digits[digit] - others) // step + 1, 1), extent - 1)
        return [_without_unit_dims(mapping.cut(longest, 0, head)), _without_unit_dims(mapping.cut(longest, head, extent))]
    return None


def _without_unit_dims(mapping: AffineMap) -> AffineMap:
    return AffineMap(mapping.src, mapping.dst, tuple(dim for dim in mapping.dims if dim[0] != 1))


def compose(mapping: AffineMap, piece: AffineMap, itemsize: int) -> list[AffineMap]:
    """Map from the targets of ``map`` to the targets of ``piece``, for all elements that both have in their first memory.

    ``piece`` must not visit a position of its first memory twice.

    Raises:
        Irregular: The result has too many parts.
    """
    mapping, piece = mapping.folded(), piece.folded()
    if not mapping.size or not piece.size or mapping.last < piece.src or piece.last < mapping.src:
        return []
    if _plain(piece, mapping, itemsize):  # by far the most common case: a view of one contiguous piece
        dst = piece.dst + mapping.src - piece.src
        return [AffineMap(mapping.dst, dst, tuple((extent, to, src) for extent, src, to in mapping.dims)).folded()]
    if _plain(mapping, piece, itemsize):
        return [AffineMap(mapping.dst + piece.src - mapping.src, piece.dst, piece.dims)]
    steps = [step for _, step, _ in piece.dims]
    extents = [extent for extent, _, _ in piece.dims]
    for dim in range(len(steps) - 1):
        if steps[dim] % steps[dim + 1] or steps[dim] < steps[dim + 1] * extents[dim + 1]:
            return [part for section in piece.each(dim) for part in compose(mapping, section, itemsize)]
    others = [dst for _, _, dst in piece.dims]
    if not steps or steps[-1] != itemsize:
        if steps and steps[-1] % itemsize:
            raise Irregular
        steps, extents, others = [*steps, itemsize], [*extents, 1], [*others, 0]
    lows = _lows(mapping.src - piece.src, steps, extents)
    origin = piece.src - sum(low * step for low, step in zip(lows, steps, strict=True))
    composed: list[AffineMap] = []
    todo = list(_aligned(mapping, origin, steps))[::-1]
    while todo:
        part = todo.pop()
        bounds = _within(part, lows, extents)
        if isinstance(bounds, int):  # several dimensions move this digit into and out of the piece: split one of them by index
            if len(todo) > _MOST_PARTS:
                raise Irregular
            todo += [again for section in part.map.each(bounds) for again in _aligned(section, origin, steps)]
        elif bounds is not None:
            dst = piece.dst
            for low, digit, other in zip(lows, part.digits, others, strict=True):
                dst += (digit - low) * other
            at, dims = part.map.dst, []
            for (_, _, to), (digit, step), (first, last) in zip(part.map.dims, part.places, bounds, strict=True):
                other = others[digit] * step if digit >= 0 else 0
                at, dst = at + first * to, dst + first * other
                dims.append((last - first, to, other))
            composed.append(AffineMap(at, dst, tuple(dims)).folded())
    return composed


def _plain(outer: AffineMap, inner: AffineMap, itemsize: int) -> bool:
    """Return whether ``outer`` is contiguous in both memories and holds all first positions of ``inner``."""
    return (
        len(outer.dims) == 1
        and outer.dims[0][1] == outer.dims[0][2] == itemsize
        and outer.src <= inner.src
        and inner.last <= outer.last
        and (inner.src - outer.src) % itemsize == 0
        and all(step % itemsize == 0 for _, step, _ in inner.dims)
    )


def _lows(apart: int, steps: Sequence[int], extents: Sequence[int]) -> list[int]:
    """First value of each digit in the piece, chosen so that the walk starts with zeros and does not carry, where possible."""
    lows, shift = [0] * len(steps), 0
    for digit in range(len(steps) - 1, 0, -1):
        radix = steps[digit - 1] // steps[digit]
        low = -((apart + shift) // steps[digit]) % radix
        if low <= radix - extents[digit]:
            lows[digit] = low
            shift += low * steps[digit]
    return lows


def _within(part: _Aligned, lows: Sequence[int], extents: Sequence[int]) -> list[tuple[int, int]] | int | None:
    """Range of indices of each dimension that lie in the piece.

    Returns:
        The ranges; ``None`` if no element lies in the piece; a dimension if that one must be split first.
    """
    bounds = [(0, dim[0]) for dim in part.map.dims]
    for place, (digit, low, extent) in enumerate(zip(part.digits, lows, extents, strict=True)):
        mine = [dim for dim, (where, _) in enumerate(part.places) if where == place]
        reach = sum(part.places[dim][1] * (part.map.dims[dim][0] - 1) for dim in mine)
        if low <= digit and digit + reach < low + extent:
            continue
        if digit >= low + extent or digit + reach < low:
            return None
        if len(mine) > 1:
            return max(mine, key=lambda dim: part.places[dim][1])
        step = part.places[mine[0]][1]
        first = max(0, -((digit - low) // step))
        last = min(part.map.dims[mine[0]][0] - 1, (low + extent - 1 - digit) // step)
        if first > last:
            return None
        bounds[mine[0]] = (first, last + 1)
    return bounds


@dataclass(frozen=True)
class BoxMap:
    """A box of a tensor and its place in the other memory: the first element's byte, and the step of each dimension of the box."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    dst: int
    steps: tuple[int, ...]


def boxes(mapping: AffineMap, shape: Sequence[int], itemsize: int, most: int) -> list[BoxMap]:
    """Express ``map`` over a C-ordered tensor of ``shape`` as boxes of that tensor, in any permutation in the other memory.

    Raises:
        Irregular: That takes more than ``most`` boxes.
    """
    wide = [dim for dim, extent in enumerate(shape) if extent > 1]
    steps = [contiguous(shape, itemsize)[dim] for dim in wide] or [itemsize]
    result: list[BoxMap] = []
    for part in _aligned(mapping.folded(), 0, steps):
        todo = [part]
        while todo:
            aligned = todo.pop()
            across: dict[int, int] = {}
            loose = -1
            for dim, (digit, step) in enumerate(aligned.places):
                if step != 1 or digit in across:
                    loose = dim
                    break
                across[digit] = dim
            if len(result) + len(todo) > most:
                raise Irregular
            if loose >= 0:
                todo += [again for each in aligned.map.each(loose) for again in _aligned(each, 0, steps)][::-1]
                continue
            starts, stops, dst = [0] * len(shape), [1] * len(shape), [0] * len(shape)
            for place, (dim, digit) in enumerate(zip(wide, aligned.digits, strict=False)):
                extent, _, to = aligned.map.dims[across[place]] if place in across else (1, 0, 0)
                starts[dim], stops[dim], dst[dim] = digit, digit + extent, to
            result.append(BoxMap(tuple(starts), tuple(stops), aligned.map.dst, tuple(dst)))
    if len(result) > most:
        raise Irregular
    return result
