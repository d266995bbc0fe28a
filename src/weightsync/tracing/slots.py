"""Traced layouts of parameters whose slots the engine exchanges with other ranks: experts that move to balance their load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from weightsync.errors import LayoutError
from weightsync.model import Box
from weightsync.tracing.tracer import Traced, TracedCopy


def at_slots(traced: Traced, slots: Mapping[str, Sequence[int]]) -> Traced:
    """Return where everything is when some parameters hold other slots than the traced ones, which may be more or fewer.

    Args:
        traced: What the loader does with parameters that hold every slot, along their first dimension.
        slots: For such a parameter the traced slot that is in each of its own. One may be in several of them, or in none.

    Raises:
        LayoutError: A parameter was not traced, or elements of a tensor are on the border of two slots.
    """
    shapes = {name: (seen.names[0], seen.shape) for seen in traced.parameters for name in seen.names}
    if strange := slots.keys() - shapes.keys():
        raise LayoutError(f"the loader was not traced with a parameter {min(strange)}")
    own = {shapes[name][0]: held for name, held in slots.items()}
    size = {first: prod(shape[1:]) for first, shape in shapes.values() if first in own}
    copies = [copy for copy in traced.copies if copy.parameter not in own]
    parts: dict[tuple[str, int], list[TracedCopy]] = {}
    for copy in traced.copies:
        if copy.parameter in own:
            for slot, part in _by_slot(copy, size[copy.parameter]):
                parts.setdefault((copy.parameter, slot), []).append(part)
    for name, held in own.items():
        for place, slot in enumerate(held):
            copies += [replace(part, offset=part.offset + place * size[name]) for part in parts.get((name, slot), ())]
    copies.sort(key=lambda copy: copy.tensor)
    kinds = [
        replace(seen, shape=(len(own[seen.names[0]]), *seen.shape[1:])) if seen.names[0] in own else seen
        for seen in traced.parameters
    ]
    return replace(traced, copies=tuple(copies), parameters=tuple(kinds))


def _by_slot(copy: TracedCopy, size: int) -> Iterator[tuple[int, TracedCopy]]:
    """Yield the parts of ``copy`` in each slot of ``size`` elements, with their offset within the slot."""
    extents = copy.box.shape
    across = [extent > 1 and step % size == 0 for extent, step in zip(extents, copy.strides, strict=True)]
    reach = sum((extent - 1) * step for extent, step, cut in zip(extents, copy.strides, across, strict=True) if not cut)
    if copy.offset % size + reach >= size:
        raise LayoutError(f"elements of a tensor are on the border of two slots of {copy.parameter}")
    for place in itertools.product(*(range(extent) if cut else (0,) for extent, cut in zip(extents, across, strict=True))):
        starts = [start + index for start, index in zip(copy.box.starts, place, strict=True)]
        stops = [start + 1 if cut else stop for start, stop, cut in zip(starts, copy.box.stops, across, strict=True)]
        offset = copy.offset + sum(index * step for index, step in zip(place, copy.strides, strict=True))
        yield offset // size, replace(copy, box=Box(tuple(starts), tuple(stops)), offset=offset % size)
