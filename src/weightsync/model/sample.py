"""Sample of a stream that every trainer rank digests, so that ranks whose tensors differ are noticed.

Each window of a stream comes from one rank. If the ranks' tensors have drifted apart, the version would be a mixture of them.
"""

from __future__ import annotations

from math import prod

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
