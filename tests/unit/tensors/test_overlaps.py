"""Rows of different tensors that share bytes are found, whatever their strides; so is memory that cannot be written."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from weightsync.errors import LayoutError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.overlaps import check_writable, overlapping
from weightsync.tensors.shards import dtype_name, shard


def found(*tensors: torch.Tensor) -> tuple[str, str] | None:
    named = {f"t{index:02d}": tensor for index, tensor in enumerate(tensors)}
    manifest = Manifest(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in named.items())
    shards = [shard(name, tensor, tensor.shape, [0] * tensor.dim()) for name, tensor in named.items()]
    layout, addresses = layout_in_place(manifest, shards)
    return overlapping(manifest, layout, addresses)


def test_what_shares_bytes_is_named() -> None:
    table = torch.zeros(12, 4)
    assert found(table, table[:10]) == ("t00", "t01")
    assert found(table, table.t()) == ("t00", "t01")
    assert found(table[:, :3], table[:, 2:]) == ("t00", "t01")
    assert found(table, table.view(4, 12)) == ("t00", "t01")
    array = np.zeros(8, np.float32)
    assert found(torch.from_numpy(array), torch.from_numpy(array[7:])) == ("t00", "t01"), "two storages of one memory"


def test_what_lies_between_another_ones_rows_shares_nothing() -> None:
    fused = torch.zeros(6, 12)
    assert found(fused[:, :4], fused[:, 4:8], fused[:, 8:]) is None
    assert found(fused[::2], fused[1::2]) is None
    assert found(fused[:, ::2], fused[:, 1::2]) is None
    assert found(*fused.view(2, 3, 12).unbind(1), torch.zeros(5)) is None
    assert found(torch.zeros(3)) is None


def test_random_views_of_one_buffer_against_a_count_of_each_byte(seed: int) -> None:
    generator = np.random.default_rng(seed)
    outcomes = set()
    for _ in range(300):
        memory = torch.zeros(400, dtype=torch.uint8)
        views = []
        for _ in range(int(generator.integers(2, 4))):
            dtype = [torch.uint8, torch.int16, torch.float32][int(generator.integers(3))]
            flat = memory.view(dtype)
            stride, shape = 1, []
            strides = []
            for _ in range(int(generator.integers(1, 4))):
                stride *= int(generator.integers(1, 4))
                extent = int(generator.integers(2, 4))
                shape.append(extent)
                strides.append(stride)
                stride *= extent
            reach = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + 1
            if reach > len(flat):
                continue
            order = generator.permutation(len(shape))
            offset = int(generator.integers(0, len(flat) - reach + 1))
            views.append(flat.as_strided([shape[i] for i in order], [strides[i] for i in order], offset))
        bytes_of = []
        for view in views:
            memory.zero_()
            view.view(view.dtype).copy_(torch.full_like(view, -1 if view.dtype != torch.uint8 else 255))
            marks = memory.clone()
            if view.dtype == torch.float32:  # -1.0 has zero bytes
                memory.zero_()
                memory.view(torch.int32).as_strided(view.shape, view.stride(), view.storage_offset()).fill_(-1)
                marks = memory.clone()
            bytes_of.append(marks != 0)
        expected = any(bool((one & two).any()) for one, two in combinations(bytes_of, 2))
        outcomes.add(expected)
        assert (found(*views) is not None) == expected, [(v.dtype, v.shape, v.stride(), v.storage_offset()) for v in views]
    assert outcomes == {False, True}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_read_only_mapping_is_refused_by_the_name_of_a_tensor_in_it(tmp_path: Path) -> None:
    np.zeros(5000, np.float32).tofile(tmp_path / "weights")
    manifest = Manifest([TensorSpec("first", (4,), "float32"), TensorSpec("mapped", (5000,), "float32")])
    for mode in ("r+", "c", "r"):
        array = np.memmap(tmp_path / "weights", np.float32, mode)
        with warnings.catch_warnings(action="ignore"):  # torch warns of such memory once
            mapped = torch.from_numpy(array)
        shards = [shard("first", torch.zeros(4), (4,), (0,)), shard("mapped", mapped, (5000,), (0,))]
        layout, addresses = layout_in_place(manifest, shards)
        if mode == "r":
            with pytest.raises(LayoutError, match="mapped is in memory that this process cannot write"):
                check_writable(manifest, layout, addresses)
        else:
            check_writable(manifest, layout, addresses)
