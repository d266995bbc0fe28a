"""Whether memory that is written in place can be: not read-only, and no byte in two tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest

_MOST_PAIRS = 1 << 14
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)  # of /proc/self/maps, without permission to write


def check_writable(manifest: Manifest, layout: Layout, addresses: Sequence[int]) -> None:
    """Reject regions at ``addresses`` that this process may not write, because a write would end the process. Needs ``/proc``.

    Raises:
        LayoutError: A region is in a read-only mapping.
    """
    with suppress(OSError):
        mappings = np.array([[int(edge, 16) for edge in edges] for edges in _MAPPING.findall(Path("/proc/self/maps").read_text())])
        if not len(mappings):
            return
        starts = np.asarray(addresses, np.int64)
        stops = starts + np.asarray(layout.regions, np.int64)
        after = np.minimum(np.searchsorted(mappings[:, 1], starts, side="right"), len(mappings) - 1)
        bad = np.flatnonzero((mappings[after, 0] < stops) & (mappings[after, 1] > starts) & (stops > starts))
        if len(bad):
            row = int(np.flatnonzero(layout.region == bad[0])[0])
            raise LayoutError(
                f"{manifest[int(layout.tensor[row])].name} is in memory that this process cannot write (a read-only mapping, "
                "such as numpy.memmap(..., 'r')): give the engine a copy of it"
            )


def overlapping(manifest: Manifest, layout: Layout, addresses: Sequence[int]) -> tuple[str, str] | None:
    """Return the names of two tensors that have a byte in common, or ``None``.

    Takes some milliseconds for ten thousands of rows. If too many rows lie between one another to compare them all, two of them are
    returned.
    """
    if len(layout) < 2:
        return None
    base = np.asarray(addresses, np.int64)[layout.region]
    starts, stops = base + layout.offset, base + layout.ends(manifest)
    order = np.argsort(starts, kind="stable")
    if not np.any(starts[order][1:] < np.maximum.accumulate(stops[order])[:-1]):
        return None
    near: list[int] = []
    pairs = 0
    for row in order.tolist():
        near = [other for other in near if stops[other] > starts[row]]
        for other in near:
            if layout.tensor[other] == layout.tensor[row]:
                continue
            pairs += 1
            if pairs > _MOST_PAIRS or _meet(manifest, layout, int(starts[row] - starts[other]), row, other):
                names = sorted(int(layout.tensor[index]) for index in (row, other))
                return manifest[names[0]].name, manifest[names[1]].name
        near.append(row)
    return None


def _meet(manifest: Manifest, layout: Layout, distance: int, row: int, other: int) -> bool:
    """Return True if two rows, of which ``row`` begins ``distance`` bytes after ``other``, have a byte in common.

    They have one if ``distance`` is a sum of multiples of their strides: of ``other``'s upwards, of ``row``'s downwards.
    """
    least: dict[int, int] = {}
    most: dict[int, int] = {}
    for index, sign in ((other, 1), (row, -1)):
        steps = (layout.stops[index] - layout.starts[index] - 1).tolist()
        itemsize = int(manifest.itemsizes[layout.tensor[index]])
        for stride, count in zip((*layout.strides[index].tolist(), 1), (*steps, itemsize - 1), strict=True):
            if count and sign > 0:
                most[stride] = most.get(stride, 0) + count
            elif count:
                least[stride] = least.get(stride, 0) - count
    strides = sorted({*least, *most}, reverse=True)
    low = np.cumsum([stride * least.get(stride, 0) for stride in reversed(strides)])[::-1].tolist()
    high = np.cumsum([stride * most.get(stride, 0) for stride in reversed(strides)])[::-1].tolist()
    left = {distance}
    for place, stride in enumerate(strides):
        # What the smaller strides can still add decides which multiples of this one are possible: usually one or two.
        rest_low, rest_high = (low[place + 1], high[place + 1]) if place + 1 < len(strides) else (0, 0)
        left = {
            rest - stride * count
            for rest in left
            for count in range(
                max(least.get(stride, 0), -(-(rest - rest_high) // stride)),
                min(most.get(stride, 0), (rest - rest_low) // stride) + 1,
            )
        }
        if not left or len(left) > _MOST_PAIRS:
            return bool(left)
    return 0 in left
