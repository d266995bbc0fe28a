"""Where the matrices of an adapter are in memory that an engine keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from weightsync.engine.lora_memory import LoraMemory, stacked_layout
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.tensors.overlaps import overlapping

STACKS = {("e.0.a", "e.1.a", "e.2.a"): (4, 24), ("e.0.b", "e.1.b", "e.2.b"): (40, 4), ("q.a",): (3, 5), ("q.b",): (7, 3)}


def memory(piece_bytes: int, seed: int = 0) -> tuple[Layout, LoraMemory]:
    specs = [TensorSpec(name, shape, "bfloat16") for names, shape in STACKS.items() for name in names]
    random.Random(seed).shuffle(specs)
    manifest = Manifest(specs)
    layout = stacked_layout(manifest, list(STACKS), piece_bytes)
    assert overlapping(manifest, layout, tuple(np.cumsum([0, *layout.regions])[:-1].tolist())) is None
    pieces = [torch.zeros(size, dtype=torch.uint8) for size in layout.regions]
    return layout, LoraMemory(manifest, layout, pieces)


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(1, 4), (600, 3), (1 << 20, 1)])
def test_matrices_of_a_stack_are_one_tensor_whatever_the_order_of_the_manifest(piece_bytes: int, pieces: int, seed: int) -> None:
    layout, held = memory(piece_bytes, seed)
    assert len(layout.regions) == len(held.addresses) == pieces
    assert set(held) == {name for names in STACKS for name in names} and len(held) == 8
    for number, name in enumerate(held):
        held[name].fill_(number)
    for names, shape in STACKS.items():
        stack = held.stack(names[0], len(names))
        assert stack.is_contiguous() and stack.shape == (len(names), *shape) and stack.data_ptr() % 64 == 0
        assert all(torch.equal(part, held[name]) and len(part.unique()) == 1 for part, name in zip(stack, names, strict=True))
    assert len({held[name].flatten()[0].item() for name in held}) == 8
