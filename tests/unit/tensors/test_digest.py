"""The digest: equal to its definition for every dtype and memory, additive over any partition, changed by any error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.digests import reference_digest
from tests.unit.tensors.samples import DTYPES, MEMORIES, random_bits, raw, stored

from weightsync.errors import LayoutError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.digest import COLUMNS, PUBLIC, DigestConstants, digest_box, digest_rows
from weightsync.tensors.kernels import BLOCK
from weightsync.tensors.memory_layout import layout_in_place
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


KEYED = DigestConstants(b"a secret of at least 128 bits.")


def test_keyed_constants_are_random_but_for_what_finds_single_errors() -> None:
    columns = KEYED.words[:BLOCK]
    assert (columns & 1).all()
    assert len(set(columns.tolist())) > 0.99 * BLOCK
    assert 0.505 < np.unpackbits(columns.view(np.uint8)).mean() < 0.526  # 15.5 of 31 bits, and the odd one
    other = DigestConstants(b"another secret of 128 bits....")
    assert abs(int((columns == other.words[:BLOCK]).sum())) < 3
    assert not (KEYED.words[BLOCK:] == other.words[BLOCK:]).any()
    assert (DigestConstants(b"a secret of at least 128 bits.").words == KEYED.words).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32, torch.int64], ids=str)
def test_the_keyed_digest_equals_its_definition_and_adds_up(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(5)
    for shape in SHAPES:
        state = {"t": stored(random_bits(shape, dtype, generator), MEMORIES[len(shape) % 4])}
        manifest, shards = shards_of(state)
        layout, addresses = layout_in_place(manifest, shards, 1000)
        keyed, public = np.zeros(len(layout), np.uint64), np.zeros(len(layout), np.uint64)
        digest_rows(manifest, layout, addresses, 0, len(layout), keyed, KEYED)
        digest_rows(manifest, layout, addresses, 0, len(layout), public, PUBLIC)
        expected = reference_digest(raw(state["t"]), dtype_name(dtype), shape, (0,) * len(shape), KEYED)
        assert int(keyed.sum(dtype=np.uint64)) == expected, shape
        assert int(public.sum(dtype=np.uint64)) == reference(state["t"]), shape
        assert expected != reference(state["t"])


def forged(true: npt.NDArray[np.uint32], wanted: npt.NDArray[np.uint32], constants: DigestConstants) -> npt.NDArray[np.uint32]:
    """``wanted``, one row of at most a block, but for two words that give it the digest of ``true``: how a thief forges."""
    columns = [int(factor) for factor in constants.words[: len(true)]]
    first, second = sorted(range(len(true)), key=columns.__getitem__)[-2:]
    a, b = columns[first], columns[second]
    words = wanted.copy()
    words[[first, second]] = 0
    for start in range(1000):
        words[0] = start
        missing = sum(factor * (int(x) - int(y)) for factor, x, y in zip(columns, true, words, strict=True))
        for wrapped in range(4):
            goal = missing % 2**64 + (wrapped << 64)
            x = goal * pow(a, -1, b) % b
            y = (goal - a * x) // b
            if 0 <= x < 1 << 32 and 0 <= y < 1 << 32:
                words[[first, second]] = x, y
                return words
    raise AssertionError("nothing fits")


def test_who_knows_the_constants_forges_the_digest_and_who_does_not_know_the_key_does_not() -> None:
    generator = np.random.default_rng(9)
    true, wanted = (generator.integers(0, 1 << 32, 1024, np.uint64).astype(np.uint32) for _ in range(2))

    def digest(words: npt.NDArray[np.uint32], constants: DigestConstants) -> int:
        return reference_digest(words.view(np.uint8).reshape(-1, 4), "float32", (1024,), (0,), constants)

    for known in (PUBLIC, KEYED):
        lie = forged(true, wanted, known)
        assert (lie != true).sum() > 1000
        assert digest(lie, known) == digest(true, known)
        fresh = DigestConstants(b"drawn when the bytes are in place")
        assert digest(lie, fresh) != digest(true, fresh)


def test_another_thread_can_stop_it() -> None:
    manifest, shards = shards_of({"t": torch.ones(4, 1 << 20)})
    layout, addresses = layout_in_place(manifest, shards, None)
    out = np.zeros(len(layout), np.uint64)
    digest_rows(manifest, layout, addresses, 0, len(layout), out, PUBLIC, np.ones(1, np.int8))
    assert not out.all()


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


def test_flipped_signs_of_a_row_cancel_out_by_fours_at_least() -> None:
    """What ``docs/digest.md`` says of them: a flipped sign of float32 adds 2^31 times its odd weight."""
    weights = {int(weight) for weight in COLUMNS}
    assert len(weights) == len(COLUMNS), "two different ones do not cancel"
    assert max(weights) < 1 << 32, "two do not add up to 2^33"
    assert all(weight % 2 for weight in weights), "an odd number of odd ones is odd"
    flipped = torch.ones(1, 4096)
    flipped[0, :2] = -1
    assert whole(flipped) != whole(torch.ones(1, 4096))
