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

__all__ = ["BoxWalk", "Irregular", "Walk", "boxes", "contiguous", "meet"]

_MOST_PARTS = 1 << 14

Dim = tuple[int, int, int]
"""Extent, and bytes between neighbors in the first and in the second memory."""


class Irregular(Exception):
    """A map splits into too many parts to follow."""


@dataclass(frozen=True)
class Walk:
    """Map of ``prod(extents)`` elements from one memory to another.

    The first element lies at byte ``here`` of the first memory and at byte ``there`` of the second. Each of ``dims`` adds its
    steps. A step may be zero (the same element several times), never negative.
    """

    here: int
    there: int
    dims: tuple[Dim, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(extent for extent, _, _ in self.dims)

    @cached_property
    def last(self) -> int:
        """Largest byte position in the first memory."""
        return self.here + sum((extent - 1) * step for extent, step, _ in self.dims)

    def folded(self) -> Walk:
        """Return the same map in the fewest dimensions, ordered by descending step in the first memory."""
        dims: list[Dim] = []
        for extent, here, there in sorted((dim for dim in self.dims if dim[0] != 1), key=lambda dim: (-dim[1], -dim[2])):
            if dims and dims[-1][1] == extent * here and dims[-1][2] == extent * there:
                extent *= dims.pop()[0]
            dims.append((extent, here, there))
        return Walk(self.here, self.there, tuple(dims))

    def swapped(self) -> Walk:
        """Return the inverse map."""
        return Walk(self.there, self.here, tuple((extent, there, here) for extent, here, there in self.dims))

    def cut(self, dim: int, first: int, last: int) -> Walk:
        """Restrict one dimension to the indices ``first <= i < last``."""
        _, here, there = self.dims[dim]
        dims = (*self.dims[:dim], (last - first, here, there), *self.dims[dim + 1 :])
        return Walk(self.here + first * here, self.there + first * there, dims)

    def each(self, dim: int) -> Iterator[Walk]:
        """Yield one map for every index of a dimension.

        Raises:
            Irregular: The dimension has too many indices.
        """
        extent, here, there = self.dims[dim]
        if extent > _MOST_PARTS:
            raise Irregular
        rest = self.dims[:dim] + self.dims[dim + 1 :]
        for index in range(extent):
            yield Walk(self.here + index * here, self.there + index * there, rest)


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbors in each dimension of a tensor in C order."""
    steps = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return tuple(steps)


@dataclass(frozen=True)
class _Aligned:
    """A map without carries: its first digits, and for each dimension the digit that it moves (-1 for none) and by how much."""

    walk: Walk
    digits: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def _aligned(walk: Walk, origin: int, steps: Sequence[int]) -> Iterator[_Aligned]:
    """Split ``walk`` into parts without carries between the digits of ``steps`` (descending, each a multiple of the next)."""
    todo, parts = [walk], 0
    while todo:
        parts += 1
        if parts > _MOST_PARTS:
            raise Irregular
        one = todo.pop()
        digits, rest = [], one.here - origin
        for step in steps:
            digit, rest = divmod(rest, step)
            digits.append(digit)
        places = [_place(dim[1], steps) for dim in one.dims]
        if rest:
            raise Irregular
        split = _split(one, digits, places, steps)
        if split is None:
            yield _Aligned(one, tuple(digits), tuple(places))
        else:
            todo += split[::-1]


def _place(step: int, steps: Sequence[int]) -> tuple[int, int]:
    if step == 0:
        return -1, 0
    for digit, each in enumerate(steps):
        if step % each == 0:
            return digit, step // each
    raise Irregular


def _split(walk: Walk, digits: Sequence[int], places: Sequence[tuple[int, int]], steps: Sequence[int]) -> list[Walk] | None:
    """Split ``walk`` into parts with fewer carries; ``None`` if it has none."""
    for digit in range(len(steps) - 1, 0, -1):
        radix = steps[digit - 1] // steps[digit]
        mine = [dim for dim, (place, _) in enumerate(places) if place == digit]
        reach = {dim: places[dim][1] * (walk.dims[dim][0] - 1) for dim in mine}
        if digits[digit] + sum(reach.values()) < radix:
            continue
        longest = max(mine, key=lambda dim: places[dim][1])
        extent, here, there = walk.dims[longest]
        step = places[longest][1]
        others = sum(reach.values()) - reach[longest]
        if digits[digit] + others < step and radix % step == 0:  # carries evenly at every ``period``-th index
            period = radix // step
            whole, rest = divmod(extent, period)
            dims = (*walk.dims[:longest], (whole, here * period, there * period), (period, here, there), *walk.dims[longest + 1 :])
            even = _without_ones(Walk(walk.here, walk.there, dims))
            return [even, _without_ones(walk.cut(longest, whole * period, extent))] if rest else [even]
        head = min(max((radix - 1 - digits[digit] - others) // step + 1, 1), extent - 1)
        return [_without_ones(walk.cut(longest, 0, head)), _without_ones(walk.cut(longest, head, extent))]
    return None


def _without_ones(walk: Walk) -> Walk:
    return Walk(walk.here, walk.there, tuple(dim for dim in walk.dims if dim[0] != 1))


def meet(walk: Walk, piece: Walk, itemsize: int) -> list[Walk]:
    """Map from the targets of ``walk`` to the targets of ``piece``, for all elements that both have in their first memory.

    ``piece`` must not visit a position of its first memory twice.

    Raises:
        Irregular: The result has too many parts.
    """
    walk, piece = walk.folded(), piece.folded()
    if not walk.size or not piece.size or walk.last < piece.here or piece.last < walk.here:
        return []
    if _plain(piece, walk, itemsize):  # by far the most common case: a view of one contiguous piece
        there = piece.there + walk.here - piece.here
        return [Walk(walk.there, there, tuple((extent, to, here) for extent, here, to in walk.dims)).folded()]
    if _plain(walk, piece, itemsize):
        return [Walk(walk.there + piece.here - walk.here, piece.there, piece.dims)]
    steps = [step for _, step, _ in piece.dims]
    extents = [extent for extent, _, _ in piece.dims]
    for dim in range(len(steps) - 1):
        if steps[dim] % steps[dim + 1] or steps[dim] < steps[dim + 1] * extents[dim + 1]:
            return [part for one in piece.each(dim) for part in meet(walk, one, itemsize)]
    others = [there for _, _, there in piece.dims]
    if not steps or steps[-1] != itemsize:
        if steps and steps[-1] % itemsize:
            raise Irregular
        steps, extents, others = [*steps, itemsize], [*extents, 1], [*others, 0]
    lows = _lows(walk.here - piece.here, steps, extents)
    origin = piece.here - sum(low * step for low, step in zip(lows, steps, strict=True))
    found: list[Walk] = []
    todo = list(_aligned(walk, origin, steps))[::-1]
    while todo:
        part = todo.pop()
        bounds = _within(part, lows, extents)
        if isinstance(bounds, int):  # several dimensions move this digit into and out of the piece: split one of them by index
            if len(todo) > _MOST_PARTS:
                raise Irregular
            todo += [again for one in part.walk.each(bounds) for again in _aligned(one, origin, steps)]
        elif bounds is not None:
            there = piece.there
            for low, digit, other in zip(lows, part.digits, others, strict=True):
                there += (digit - low) * other
            at, dims = part.walk.there, []
            for (_, _, to), (digit, step), (first, last) in zip(part.walk.dims, part.places, bounds, strict=True):
                other = others[digit] * step if digit >= 0 else 0
                at, there = at + first * to, there + first * other
                dims.append((last - first, to, other))
            found.append(Walk(at, there, tuple(dims)).folded())
    return found


def _plain(one: Walk, other: Walk, itemsize: int) -> bool:
    """Whether ``one`` is contiguous in both memories and holds all first positions of ``other``."""
    return (
        len(one.dims) == 1
        and one.dims[0][1] == one.dims[0][2] == itemsize
        and one.here <= other.here
        and other.last <= one.last
        and (other.here - one.here) % itemsize == 0
        and all(step % itemsize == 0 for _, step, _ in other.dims)
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
    bounds = [(0, dim[0]) for dim in part.walk.dims]
    for place, (digit, low, extent) in enumerate(zip(part.digits, lows, extents, strict=True)):
        mine = [dim for dim, (where, _) in enumerate(part.places) if where == place]
        reach = sum(part.places[dim][1] * (part.walk.dims[dim][0] - 1) for dim in mine)
        if low <= digit and digit + reach < low + extent:
            continue
        if digit >= low + extent or digit + reach < low:
            return None
        if len(mine) > 1:
            return max(mine, key=lambda dim: part.places[dim][1])
        step = part.places[mine[0]][1]
        first = max(0, -((digit - low) // step))
        last = min(part.walk.dims[mine[0]][0] - 1, (low + extent - 1 - digit) // step)
        if first > last:
            return None
        bounds[mine[0]] = (first, last + 1)
    return bounds


@dataclass(frozen=True)
class BoxWalk:
    """A box of a tensor and its place in the other memory: the first element's byte, and the step of each dimension of the box."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    there: int
    steps: tuple[int, ...]


def boxes(walk: Walk, shape: Sequence[int], itemsize: int, most: int) -> list[BoxWalk]:
    """Express ``walk`` over a C-ordered tensor of ``shape`` as boxes of that tensor, in any permutation in the other memory.

    Raises:
        Irregular: That takes more than ``most`` boxes.
    """
    wide = [dim for dim, extent in enumerate(shape) if extent > 1]
    steps = [contiguous(shape, itemsize)[dim] for dim in wide] or [itemsize]
    found: list[BoxWalk] = []
    for part in _aligned(walk.folded(), 0, steps):
        todo = [part]
        while todo:
            one = todo.pop()
            across: dict[int, int] = {}
            loose = -1
            for dim, (digit, step) in enumerate(one.places):
                if step != 1 or digit in across:
                    loose = dim
                    break
                across[digit] = dim
            if len(found) + len(todo) > most:
                raise Irregular
            if loose >= 0:
                todo += [again for each in one.walk.each(loose) for again in _aligned(each, 0, steps)][::-1]
                continue
            starts, stops, there = [0] * len(shape), [1] * len(shape), [0] * len(shape)
            for place, (dim, digit) in enumerate(zip(wide, one.digits, strict=False)):
                extent, _, to = one.walk.dims[across[place]] if place in across else (1, 0, 0)
                starts[dim], stops[dim], there[dim] = digit, digit + extent, to
            found.append(BoxWalk(tuple(starts), tuple(stops), one.walk.there, tuple(there)))
    if len(found) > most:
        raise Irregular
    return found
