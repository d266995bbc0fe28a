"""The GPU's digest is the CPU's, bit for bit: every dtype, boxes that cut words, narrow rows, scalars, transposed memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.gpu.reference import Held, hold

from weightsync.errors import LayoutError
from weightsync.model import ITEMSIZE
from weightsync.tensors.digest import DigestConstants, digest_rows

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="needs Triton")

_SHAPES = [
    (),
    (1,),
    (7,),
    (5, 33),
    (64, 96),
    (3, 5, 24),
    (4, 1, 3, 2),
    (2, 9000),
    (40, 16),
    (3, 4, 5, 6),
    (300, 1),
    (6, 4100),
    (1, 8200),
    (9, 2048),
    (2, 3, 2, 513),
    (20000,),
]


def _on_device(held: Held, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(held.memory).to(device)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("permute", [False, True], ids=["rows", "permuted"])
def test_equals_the_definition_for_odd_boxes(seed: int, dtype: str, permute: bool) -> None:
    from weightsync.tensors.cuda.digest import LayoutDigest

    random = np.random.default_rng(seed)
    for shape in _SHAPES:
        held = hold(
            random,
            shape,
            dtype,
            ITEMSIZE[dtype],
            cuts=int(random.integers(0, 6)),
            permute=permute,
            shift=int(random.choice([0, 1, 4])),
        )
        memory = _on_device(held, torch.device("cuda"))
        got = LayoutDigest(held.manifest, held.layout, [memory.data_ptr()], memory.device).digests()
        assert got.tolist() == held.digests, (shape, held.layout.starts.tolist(), held.layout.stops.tolist())
        assert int(got.sum(dtype=np.uint64)) == held.whole


@pytest.mark.parametrize("permute", [False, True], ids=["rows", "permuted"])
@pytest.mark.parametrize("key", [b"", b"a secret of at least 128 bits."], ids=["public", "keyed"])
def test_equals_the_cpu_kernel_and_repeats(seed: int, key: bytes, permute: bool) -> None:
    from weightsync.tensors.cuda.digest import LayoutDigest

    random = np.random.default_rng(seed)
    held = hold(random, (700, 2050), "bfloat16", 2, cuts=20, permute=permute, shift=0)
    want, constants = np.zeros(len(held.layout), np.uint64), DigestConstants(key)
    digest_rows(held.manifest, held.layout, [held.memory.ctypes.data], 0, len(want), want, constants)
    memory = _on_device(held, torch.device("cuda"))
    digest = LayoutDigest(held.manifest, held.layout, [memory.data_ptr()], memory.device)
    for _ in range(3):
        assert np.array_equal(digest.digests(constants=constants), want)
    assert np.array_equal(digest.digests(5, 11, constants), want[5:11])
    assert not np.array_equal(digest.digests(constants=DigestConstants(b"another secret of 128 bits")), want)


def test_one_changed_bit_changes_its_row_only(seed: int) -> None:
    from weightsync.tensors.cuda.digest import LayoutDigest

    random = np.random.default_rng(seed)
    held = hold(random, (64, 1000), "float32", 4, cuts=9, permute=False, shift=0)
    memory = _on_device(held, torch.device("cuda"))
    digest = LayoutDigest(held.manifest, held.layout, [memory.data_ptr()], memory.device)
    before = digest.digests()
    row = int(random.integers(len(held.layout)))
    memory[int(held.layout.offset[row])] ^= 1 << int(random.integers(8))
    changed = np.flatnonzero(digest.digests() != before)
    assert changed.tolist() == [row]


def test_nothing_is_read_past_the_boxes(seed: int) -> None:
    """Neighbouring bytes may be anything: they belong to others."""
    from weightsync.tensors.cuda.digest import LayoutDigest

    random = np.random.default_rng(seed)
    held = hold(random, (50, 77), "uint8", 1, cuts=4, permute=True, shift=3)
    values = []
    for fill in (0, 255):
        memory = torch.full((len(held.memory) + 512,), fill, dtype=torch.uint8, device="cuda")
        memory[256 : 256 + len(held.memory)] = _on_device(held, memory.device)
        gaps = np.ones(len(held.memory), bool)
        for row in range(len(held.layout)):
            extents = held.layout.stops[row] - held.layout.starts[row]
            at = held.layout.offset[row] + sum(
                np.arange(n).reshape([-1 if d == dim else 1 for d in range(len(extents))]) * held.layout.strides[row, dim]
                for dim, n in enumerate(extents)
            )
            gaps[np.asarray(at).ravel()] = False
        memory[256 : 256 + len(held.memory)][torch.from_numpy(gaps).to(memory.device)] = fill
        values.append(LayoutDigest(held.manifest, held.layout, [memory.data_ptr() + 256], memory.device).digests().tolist())
    assert values[0] == values[1] == held.digests


def test_wrong_number_of_addresses_is_refused(seed: int) -> None:
    from weightsync.tensors.cuda.digest import LayoutDigest

    held = hold(np.random.default_rng(seed), (4, 4), "float32", 4, cuts=0, permute=False, shift=0)
    with pytest.raises(LayoutError, match="addresses"):
        LayoutDigest(held.manifest, held.layout, [], torch.device("cuda"))
