"""Trace where a converter puts the elements of a parameter, by sending their numbers through it instead of weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weightsync.errors import LayoutError

_MOST_BOXES = 65_536
"""Per parameter. A converter that interleaves single columns needs more, and its copies would be two bytes long."""
_CHUNK = 1 << 24
_NOT_HELD = -1

Start = tuple[int, ...]


@dataclass(frozen=True)
class TracedBox:
    """A box of a converted tensor and where its elements are in the parameter: at ``offset``, in elements, with ``strides``.

    ``added`` is the constant that the converter adds to each of them.
    """

    starts: Start
    extents: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    added: float = 0.0


def trace(
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], shape: tuple[int, ...], device: torch.device
) -> list[tuple[tuple[int, ...], list[TracedBox]]]:
    """Return the shape and the boxes of each tensor that ``convert`` makes of a parameter, in its order.

    Args:
        convert: Converts a parameter of ``shape``, local to this rank. What other ranks hold is NaN in its results.
        shape: Local shape of the parameter.
        device: Where to convert. It takes about eight times the memory of the parameter in float64.

    Raises:
        LayoutError: The results are no views of the parameter plus a constant: the converter computes, drops, or repeats elements.
    """
    size = torch.Size(shape).numel()
    numbers = torch.arange(size, dtype=torch.float64, device=device).view(shape)
    # Twice, because a permutation and arithmetic can give the same numbers once: x + 1 looks like a shift by one element.
    once, twice = convert(numbers.clone()), convert(numbers * 2)
    seen = torch.zeros(size, dtype=torch.bool, device=device)
    results, reached = [], 0
    for name, first in once.items():
        number = twice[name] - first
        held = ~number.isnan()
        constants = torch.unique((first - number)[held]).tolist()
        index = number.nan_to_num(nan=_NOT_HELD).to(torch.int64)
        known = index[held]
        exact = torch.equal(known.to(torch.float64), number[held]) and not bool(((known < 0) | (known >= size)).any())
        if len(constants) > 1 or not exact:
            raise LayoutError(f"the converter computes {name} out of the weights, so it is no view of them")
        seen[known] = True
        reached += len(known)
        added = constants[0] if constants else 0.0
        results.append((tuple(first.shape), [TracedBox(*box, added) for box in _boxes(index, (0,) * index.dim())]))
        if sum(len(boxes) for _, boxes in results) > _MOST_BOXES:
            raise LayoutError(f"the converter scatters {name} in more than {_MOST_BOXES:,} pieces")
    if reached != int(seen.sum()):
        raise LayoutError(f"the converter repeats elements in {', '.join(once)}")
    return results


def _boxes(index: torch.Tensor, origin: Start) -> Iterator[tuple[Start, tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the largest boxes of ``index`` whose elements have one stride in each dimension."""
    pending, count = [(index, origin)], 0
    while pending:
        part, starts = pending.pop()
        part, starts = _cropped(part, starts)
        if not part.numel():
            continue
        strides = _strides(part)
        if strides is not None:
            yield starts, tuple(part.shape), int(part[(0,) * part.dim()]), strides
            count += 1
            if count > _MOST_BOXES:
                return  # the caller raises the error
            continue
        dim, cuts = _split(part)
        for first, last in reversed(list(zip([0, *cuts], [*cuts, part.shape[dim]], strict=True))):
            shifted = tuple(start + first * (dim == at) for at, start in enumerate(starts))
            pending.append((part.narrow(dim, first, last - first), shifted))


def _cropped(part: torch.Tensor, starts: Start) -> tuple[torch.Tensor, Start]:
    """Return ``part`` without what other ranks hold around it."""
    if not part.numel() or int(part.min()) >= 0:
        return part, starts
    for dim in range(part.dim()):
        others = [other for other in range(part.dim()) if other != dim]
        held = (part >= 0).any(others) if others else part >= 0
        at = held.nonzero().flatten()
        if not len(at):
            return part.narrow(dim, 0, 0), starts
        first, last = int(at[0]), int(at[-1])
        part = part.narrow(dim, first, last - first + 1)
        starts = tuple(start + first * (dim == other) for other, start in enumerate(starts))
    return part, starts


def _strides(part: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of ``part`` in the parameter, or ``None`` if it has no single ones."""
    corner = part[(0,) * part.dim()]
    strides = []
    for dim, extent in enumerate(part.shape):
        stride = int(part.select(dim, 1)[(0,) * (part.dim() - 1)] - corner) if extent > 1 else 1
        if stride <= 0:
            return None
        strides.append(stride)
    if not part.dim():
        return ()
    within = corner.clone()
    for extent, stride in zip(part.shape[1:], strides[1:], strict=True):
        within = within.unsqueeze(-1) + torch.arange(extent, device=part.device) * stride
    rows = max(1, _CHUNK // max(within.numel(), 1))
    for first in range(0, part.shape[0], rows):
        some = part[first : first + rows]
        steps = torch.arange(first, first + len(some), device=part.device) * strides[0]
        if not torch.equal(some, steps.view(-1, *[1] * within.dim()) + within):
            return None
    return tuple(strides)


def _split(part: torch.Tensor) -> tuple[int, list[int]]:
    """Return the dimension, and where to cut it, that needs the fewest cuts; halves if no line through a corner shows a cut."""
    best: tuple[int, list[int]] | None = None
    for dim in range(part.dim()):
        for corner in (0, -1):
            line = part
            for other in reversed(range(part.dim())):
                if other != dim:
                    line = line.select(other, corner)
            cuts = _cuts(line)
            if cuts and (best is None or len(cuts) < len(best[1])):
                best = dim, cuts
    if best is not None:
        return best
    dim = max(range(part.dim()), key=lambda at: part.shape[at])
    return dim, [part.shape[dim] // 2]


def _cuts(line: torch.Tensor) -> list[int]:
    """Return where the runs of a line begin, but for the first: elements with one step between them, or held elsewhere."""
    held = line >= 0
    steps = torch.where(held[1:] | held[:-1], line[1:] - line[:-1], 0)
    broken = held[1:] != held[:-1]
    breaks = broken.tolist()
    differs = (steps[1:] != steps[:-1]) | broken[1:] | broken[:-1]
    changes = ((differs.nonzero().flatten()) + 1).tolist()
    cuts, start = list[int](), 0
    while start < len(breaks):
        if breaks[start]:
            last = start
        else:
            following = bisect_right(changes, start)
            if following == len(changes):
                break
            last = changes[following]
        start = last + 1
        cuts.append(start)
    return cuts
