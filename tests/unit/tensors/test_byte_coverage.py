"""Coverage counts what a set of element addresses would."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from weightsync.tensors.byte_coverage import ByteCoverage, LocalView


def _view(random: np.random.Generator) -> LocalView:
    dims = int(random.integers(0, 4))
    shape, strides = random.integers(0 if random.random() < 0.1 else 1, 5, dims), random.integers(0, 12, dims)
    dtype = (torch.uint8, torch.int16, torch.float32)[int(random.integers(0, 3))]
    return LocalView(1, int(random.integers(0, 20)), tuple(strides.tolist()), tuple(shape.tolist()), dtype)


def _bytes(view: LocalView) -> set[int]:
    size = view.dtype.itemsize
    elements = (
        view.offset + sum(place * stride for place, stride in zip(places, view.strides, strict=True))
        for places in itertools.product(*map(range, view.shape))
    )
    return {element * size + byte for element in elements for byte in range(size)}


def test_bytes_that_no_view_covers_are_counted(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(300):
        views = [_view(random) for _ in range(int(random.integers(0, 5)))]
        asked = _view(random)
        covered = set[int]().union(*map(_bytes, views))
        assert ByteCoverage(views).lacking(asked) == len(_bytes(asked) - covered), (views, asked)
