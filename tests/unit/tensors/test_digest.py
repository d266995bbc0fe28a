"""The digest: equal to its definition for every dtype and memory, additive over any partition, changed by any error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tensors.samples import DTYPES, MEMORIES, random_bits, raw, stored

from weightsync.errors import LayoutError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.digest import COLUMNS, digest_box, digest_rows, reference_digest
from weightsync.tensors.memory import layout_in_place
from weightsync.tensors.shards import dtype_name, shards_of

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 9), (1, 20011), (3, 8192), (2, 8193), (40000,))


def whole(tensor: torch.Tensor) -> int:
    return digest_box(tensor, tensor.shape, [0] * tensor.dim())


def reference(tensor: torch.Tensor, shape: tuple[int, ...] | None = None, starts: tuple[int, ...] | None = None) -> int:
    shape = tuple(tensor.shape) if shape is None else shape
    return reference_digest(raw(tensor), dtype_name(tensor.dtype), shape, (0,) * tensor.dim() if starts is None else starts)


def test_known_values() -> None:
    """Pinned, so that no release changes the digest without meaning to; the GPU's has the same."""
    assert int(COLUMNS[0]) == ((0x481EC0A212A9F3DB & 0xFFFFFFFF) | 1)
    assert len(set(COLUMNS.tolist())) == len(COLUMNS) == 4096
    # R(0) = splitmix64(0) | 1 is published with the algorithm: 0xe220a8397b1dcdaf.
    one = torch.ones(1, dtype=torch.int32)
    assert whole(one) == 0xE220A8397B1DCDAF * int(COLUMNS[0]) % 2**64


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition(dtype: torch.dtype, memory: str) -> None:
    generator = np.random.default_rng(7)
    for shape in SHAPES:
        tensor = random_bits(shape, dtype, generator)
        assert whole(stored(tensor, memory)) == reference(tensor), (shape, dtype, memory)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_nothing_has_digest_zero(shape: tuple[int, ...]) -> None:
    assert whole(torch.empty(shape)) == 0


@settings(max_examples=120)
@given(st.data())
def test_adds_up_over_random_partitions(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 4))
    shape = (*(data.draw(st.integers(1, 9)) for _ in range(dims - 1)), data.draw(st.sampled_from([1, 3, 10, 33, 5000])))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = stored(
        random_bits(shape, dtype, np.random.default_rng(data.draw(st.integers(0, 99)))), data.draw(st.sampled_from(MEMORIES))
    )
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * dims, shape)]
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(parts) - 1))
        starts, stops = parts[index]
        dim = data.draw(st.integers(0, dims - 1))
        cut = data.draw(st.integers(starts[dim], stops[dim]))
        low = (starts, (*stops[:dim], cut, *stops[dim + 1 :]))
        high = ((*starts[:dim], cut, *starts[dim + 1 :]), stops)
        parts[index : index + 1] = [low, high]
    total = 0
    for starts, stops in parts:
        box = tensor[tuple(map(slice, starts, stops))]
        total += digest_box(box, shape, starts)
    assert total % 2**64 == whole(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64, torch.float32], ids=str)
def test_unaligned_boxes_equal_the_definition(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(3)
    tensor = random_bits((3, 4, 16421), dtype, generator)
    for starts, stops in [
        ((0, 1, 1), (3, 3, 2)),
        ((1, 0, 3), (2, 4, 16420)),
        ((0, 0, 8191), (1, 1, 8194)),
        ((2, 3, 16420), (3, 4, 16421)),
    ]:
        box = tensor[tuple(map(slice, starts, stops))]
        assert digest_box(box, tensor.shape, starts) == reference(box, tuple(tensor.shape), starts)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.int64]))
def test_any_flipped_bit_changes_it(seed: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(seed)
    tensor = random_bits((5, 33), dtype, generator)
    before = whole(tensor)
    data = tensor.view(torch.uint8).numpy().reshape(-1)
    data[generator.integers(len(data))] ^= np.uint8(1 << generator.integers(8))
    assert whole(tensor) != before


def test_misplaced_elements_change_it() -> None:
    tensor = random_bits((8, 32), torch.bfloat16, np.random.default_rng(5))
    bits = tensor.view(torch.int16)
    others = {
        "rows swapped": bits[[1, 0, *range(2, 8)]],
        "columns swapped": bits[:, [1, 0, *range(2, 32)]],
        "distant columns swapped": bits[:, [30, *range(1, 30), 0, 31]],
        "shifted": bits.roll(1, 1),
        "shifted by a row": bits.roll(1, 0),
        "transposed": bits.t().contiguous().view(8, 32),
        "a row twice": bits[[0, 0, *range(2, 8)]],
    }
    digests = {name: whole(other.contiguous().view(torch.bfloat16)) for name, other in others.items()}
    assert whole(tensor) not in digests.values()
    assert len(set(digests.values())) == len(digests)


def test_rows_of_a_layout_add_up_to_their_tensors() -> None:
    generator = np.random.default_rng(11)
    state = {f"t{i}.{j}": stored(random_bits(shape, dtype, generator), MEMORIES[(i + j) % 4])
             for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES)}  # fmt: skip
    manifest, shards = shards_of(state)
    layout, addresses = layout_in_place(manifest, shards, 1000)
    out = np.zeros(len(layout), np.uint64)
    middle = len(layout) // 2
    digest_rows(manifest, layout, addresses, middle, len(layout), out)
    assert not out[:middle].any()
    digest_rows(manifest, layout, addresses, 0, middle, out)
    for index, spec in enumerate(manifest):
        assert int(out[layout.tensor == index].sum(dtype=np.uint64)) == reference(state[spec.name]), spec.name


def test_refuses_what_it_cannot_read() -> None:
    manifest = Manifest([TensorSpec("a", (2, 3), "float32")])
    tensor = torch.zeros(2, 3)
    layout, addresses = layout_in_place(*shards_of({"a": tensor}), None)
    with pytest.raises(LayoutError, match="rows 0:2"):
        digest_rows(manifest, layout, addresses, 0, 2, np.zeros(1, np.uint64))
    with pytest.raises(LayoutError, match="into uint64"):
        digest_rows(manifest, layout, addresses, 0, 1, np.zeros(2, np.uint64))
    with pytest.raises(LayoutError, match="2 addresses"):
        digest_rows(manifest, layout, (1, 2), 0, 1, np.zeros(1, np.uint64))
    with pytest.raises(LayoutError, match="outside"):
        digest_box(tensor, (2, 3), (1, 0))
    with pytest.raises(LayoutError, match="shape"):
        digest_box(tensor, (2, 3), (0,))
