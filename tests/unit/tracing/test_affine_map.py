"""Holds the arithmetic behind tracing to brute force: meetings of walks and boxes of walks, over random views of small tensors."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from weightsync.tracing.affine_map import AffineMap, Irregular, boxes, compose, contiguous

ROUNDS = 15


def pairs(walk: AffineMap) -> list[tuple[int, int]]:
    """Every place here, and its place there."""
    found = []
    for index in itertools.product(*(range(extent) for extent, _, _ in walk.dims)):
        here = sum(i * step for i, (_, step, _) in zip(index, walk.dims, strict=True))
        there = sum(i * step for i, (_, _, step) in zip(index, walk.dims, strict=True))
        found.append((walk.src + here, walk.dst + there))
    return found


def random_view(shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    view = torch.empty(shape, device="meta")
    for _ in range(draw.randint(0, 5)):
        dim = draw.randrange(view.dim())
        match draw.choice(["narrow", "transpose", "reshape", "step"]):
            case "narrow":
                first = draw.randrange(view.shape[dim])
                view = view.narrow(dim, first, draw.randint(1, view.shape[dim] - first))
            case "transpose":
                view = view.transpose(dim, draw.randrange(view.dim()))
            case "reshape":
                divisors = [k for k in range(1, view.numel() + 1) if view.numel() % k == 0]
                rows = draw.choice(divisors)
                if view.is_contiguous():
                    view = view.view(rows, view.numel() // rows) if draw.random() < 0.7 else view.view(-1)
            case _:
                view = view[(slice(None),) * dim + (slice(draw.randrange(min(2, view.shape[dim])), None, draw.randint(1, 3)),)]
    return view


def walk(view: torch.Tensor, base: int, itemsize: int) -> AffineMap:
    steps = contiguous(view.shape, itemsize)
    dims = tuple((n, stride * itemsize, step) for n, stride, step in zip(view.shape, view.stride(), steps, strict=True))
    return AffineMap(int(view.storage_offset()) * itemsize, base, dims)


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_meetings_and_boxes_are_those_of_brute_force(seed: int, round_: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        itemsize = draw.choice([1, 2, 4])
        one = walk(random_view(shape, draw), 1000, itemsize)
        other = walk(random_view(shape, draw), 5000, itemsize)
        there = dict(pairs(other))
        wanted = sorted((to, there[here]) for here, to in pairs(one) if here in there)
        assert sorted(pair for part in compose(one, other, itemsize) for pair in pairs(part)) == wanted
        found = []
        steps = contiguous(shape, itemsize)
        for box in boxes(one, shape, itemsize, 10**6):
            for index in itertools.product(*(range(a, b) for a, b in zip(box.starts, box.stops, strict=True))):
                here = sum(i * step for i, step in zip(index, steps, strict=True))
                found.append((here, box.dst + sum((i - a) * s for i, a, s in zip(index, box.starts, box.steps, strict=True))))
        assert sorted(found) == sorted(pairs(one))


def test_the_common_cases_take_one_part() -> None:
    whole = AffineMap(0, 0, ((6, 32, 32), (8, 4, 4)))
    assert whole.folded() == AffineMap(0, 0, ((48, 4, 4),))
    columns = AffineMap(16, 0, ((6, 32, 16), (4, 4, 4)))  # the right half of each row
    assert boxes(columns, (6, 8), 4, 1)[0].starts == (0, 4)
    assert len(compose(whole, columns, 4)) == len(compose(columns, whole, 4)) == 1
    turned = AffineMap(0, 0, ((6, 32, 4), (8, 4, 24)))
    (box,) = boxes(turned, (6, 8), 4, 1)
    assert (box.stops, box.steps) == ((6, 8), (4, 24))


def test_an_element_written_to_many_places_is_as_many_boxes() -> None:
    assert [box.dst for box in boxes(AffineMap(8, 0, ((3, 0, 4),)), (4,), 4, 3)] == [0, 4, 8]
    with pytest.raises(Irregular):
        boxes(AffineMap(8, 0, ((3, 0, 4),)), (4,), 4, 2)


def test_what_would_never_end_is_refused_soon() -> None:
    with pytest.raises(Irregular):
        compose(AffineMap(0, 0, ((1 << 30, 8, 4),)), AffineMap(0, 0, ((1 << 30, 12, 4), (2, 8, 4))), 4)
