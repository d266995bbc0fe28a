"""Batches of whole tensors arrive in shards bit for bit, whatever the strides, and nothing else is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightsync.errors import LayoutError, LoadError
from weightsync.tensors.copies import copy_tiles
from weightsync.tensors.copy_table import tiles_between
from weightsync.tensors.shard_loader import ShardLoader
from weightsync.tensors.shards import Shard, shard

_DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


def _strided(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of this shape with random bits (NaNs among them) and random strides."""
    padded = [size + int(random.integers(0, 3)) for size in shape]
    order = random.permutation(len(shape)).tolist()
    count = int(np.prod([padded[dim] for dim in order])) * dtype.itemsize
    raw = torch.from_numpy(random.integers(0, 256, count, dtype=np.uint8)).view(dtype)
    whole = raw.reshape([padded[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    return whole[tuple(slice(0, size) for size in shape)]


def _case(random: np.random.Generator, count: int) -> tuple[list[Shard], list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
    """Shards, a batch for them, and what each of the shards should then hold."""
    shards, batch, expected = list[Shard](), list[tuple[str, torch.Tensor]](), list[torch.Tensor]()
    for number in range(count):
        dtype = _DTYPES[int(random.integers(0, len(_DTYPES)))]
        shape = tuple(int(size) for size in random.integers(1, 9, int(random.integers(0, 4))))
        starts = tuple(int(random.integers(0, size)) for size in shape)
        stops = tuple(int(random.integers(first + 1, size + 1)) for first, size in zip(starts, shape, strict=True))
        whole = _strided(random, shape, dtype) if random.integers(0, 2) else _strided(random, shape, dtype).contiguous()
        part = _strided(random, tuple(b - a for a, b in zip(starts, stops, strict=True)), dtype)
        shards.append(shard(f"t{number}", part, shape, starts))
        batch.append((f"t{number}", whole))
        expected.append(whole[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))])
    return shards, batch, expected


def _bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    flat = [torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.cpu().reshape(-1)) for tensor in tensors]
    return [tensor.view(torch.uint8).tolist() for tensor in flat]


def test_the_table_of_any_pairs_copies_them_bit_for_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(20):
        shards, _, sources = _case(random, 12)
        targets = [one.tensor for one in shards]
        tiles = tiles_between(targets, sources)
        assert tiles.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in targets)
        copy_tiles(tiles, [0])
        assert _bits(targets) == _bits(sources)


def test_a_batch_on_the_cpu_arrives_bit_for_bit(seed: int) -> None:
    shards, batch, expected = _case(np.random.default_rng(seed), 60)
    ShardLoader(shards).load(iter(batch))
    assert _bits([one.tensor for one in shards]) == _bits(expected)


def test_every_shard_of_a_tensor_is_filled() -> None:
    whole = torch.arange(12.0).view(4, 3)
    first, last, copy = torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(4, 3)
    ShardLoader([shard("w", part, (4, 3), (at, 0)) for part, at in ((first, 0), (last, 2), (copy, 0))]).load([("w", whole)])
    assert torch.equal(first, whole[:1])
    assert torch.equal(last, whole[2:])
    assert torch.equal(copy, whole)
    loader = ShardLoader([shard("w", first[0], (3,), (0,)), shard("w", torch.zeros(1).half(), (3,), (2,))])
    with pytest.raises(LoadError, match=r"w is torch.float16\[3\]"):
        loader.load([("w", torch.ones(3))])
    assert not first[0][0]


def test_columns_and_transposed_memory_become_few_tiles() -> None:
    whole, part = torch.arange(64, dtype=torch.int32).reshape(8, 8), torch.zeros(8, 4, dtype=torch.int32)
    assert len(tiles_between([part], [whole[:, 2:6]])) == 1
    assert len(tiles_between([whole], [whole.clone()])) == 1
    assert len(tiles_between([], [])) == 0


def test_tensors_that_do_not_fit_are_refused() -> None:
    loader = ShardLoader([shard("w", torch.zeros(2, 3), (2, 3), (0, 0))])
    with pytest.raises(LoadError, match="no parameter named 'v'"):
        loader.load([("v", torch.zeros(2, 3))])
    with pytest.raises(LoadError, match=r"w is torch.float32\[2, 3\] in this engine, but arrived as torch.float64\[2, 3\]"):
        loader.load([("w", torch.zeros(2, 3, dtype=torch.float64))])
    with pytest.raises(LoadError, match=r"arrived as torch.float32\[3, 2\]"):
        loader.load([("w", torch.zeros(3, 2))])
    with pytest.raises(LayoutError, match="cannot be copied"):
        tiles_between([torch.zeros(2, 3)], [torch.zeros(3, 2)])
    loader.load([])


@pytest.mark.gpu
def test_a_batch_on_a_gpu_arrives_bit_for_bit_each_time(seed: int) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    shards, batch, _ = _case(np.random.default_rng(seed), 80)
    base = torch.zeros(513, 257, dtype=torch.int16, device="cuda")
    there = [shard(one.name, one.tensor.cuda(), one.shape, one.box.starts) for one in shards]
    there.append(shard("base", base[3:, 5:200], (600, 400), (7, 11)))
    sent = [(name, tensor.cuda()) for name, tensor in batch]
    sent.append(("base", torch.randint(-(1 << 15), 1 << 15, (400, 600), dtype=torch.int16, device="cuda").t()))
    loader = ShardLoader(there)
    for _ in range(3):
        loader.load(sent)
        torch.cuda.synchronize()
        wanted = [
            whole[tuple(slice(a, b) for a, b in zip(one.box.starts, one.box.stops, strict=True))]
            for one, (_, whole) in zip(there, sent, strict=True)
        ]
        assert _bits([one.tensor for one in there]) == _bits(wanted)
        assert not base[:3].any()
        assert not base[:, :5].any()
        for _, whole in sent:
            whole.copy_(whole.flip(0) if whole.ndim else whole)
    assert loader.table_bytes > 0
