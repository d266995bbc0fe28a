"""ATen operators that copy elements into new tensors, described as pairs of a part of the result and a part of an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

_MOST_ROWS = 4096

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]] | None
"""Targets, which together are the whole result except constants, and sources of equal shapes; ``None`` if it is not a copy."""


def _same(result: torch.Tensor, source: torch.Tensor, *_: object, **__: object) -> Pairs:
    return [(result, source)]


def _cat(result: torch.Tensor, sources: Sequence[torch.Tensor], dim: int = 0) -> Pairs:
    return _along(result, [source for source in sources if source.dim() == result.dim()], dim)


def _along(result: torch.Tensor, sources: Iterable[torch.Tensor], dim: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    first = 0
    for source in sources:
        yield result.narrow(dim, first, source.shape[dim]), source
        first += source.shape[dim]


def _stack(result: torch.Tensor, sources: Sequence[torch.Tensor], dim: int = 0) -> Pairs:
    return [(result.select(dim, place), source) for place, source in enumerate(sources)]


def _pad(result: torch.Tensor, source: torch.Tensor, pad: Sequence[int], *_: object) -> Pairs:
    for place in range(0, len(pad), 2):
        dim = source.dim() - 1 - place // 2
        source = source.narrow(dim, max(-pad[place], 0), source.shape[dim] + min(pad[place], 0) + min(pad[place + 1], 0))
        result = result.narrow(dim, max(pad[place], 0), source.shape[dim])
    return [(result, source)]


def _reshaped(result: torch.Tensor, source: torch.Tensor, *_: object) -> Pairs:
    return [(result, source.view(result.shape))]


def _repeat(result: torch.Tensor, source: torch.Tensor, repeats: Sequence[int]) -> Pairs:
    shape = [1] * (len(repeats) - source.dim()) + list(source.shape)
    if not result.numel():
        return None
    target = result.view([extent for pair in zip(repeats, shape, strict=True) for extent in pair])
    return [(target, source.view_as(source).reshape([extent for length in shape for extent in (1, length)]))]


def _picked(result: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor) -> Pairs:
    """Rows selected by a list of numbers, with consecutive rows merged."""
    if index.is_meta or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    rows = [row % source.shape[dim] for row in index.tolist()]
    heads = [place for place, row in enumerate(rows) if not place or row != rows[place - 1] + 1]
    if len(heads) > _MOST_ROWS:
        return None
    ends = [*heads[1:], len(rows)]
    return [
        (result.narrow(dim, head, end - head), source.narrow(dim, rows[head], end - head))
        for head, end in zip(heads, ends, strict=True)
    ]


def _indexed(result: torch.Tensor, source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Pairs:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return _picked(result, source, *given[0]) if len(given) == 1 else None


COPYING: dict[str, Callable[..., Pairs]] = {
    "clone": _same,
    "_to_copy": _same,
    "_unsafe_view": _reshaped,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "index_select": _picked,
    "index": _indexed,
}
"""By name of the operator: a function of its result and its arguments."""
