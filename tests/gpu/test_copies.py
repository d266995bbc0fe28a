"""Tiles arrive exactly: any alignment, any strides, runs of a byte and runs of megabytes; nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.device_copy_table import TILE_BYTES, DeviceCopyTable

Bytes = npt.NDArray[np.uint8]

_ROOM = 1 << 22
_RUNS = [1, 2, 6, 16, 48, 100, 384, 1000, 4096, 20000, 65536, 70000, 300000]


def _tiles(*rows: tuple[int, ...]) -> CopyTable:
    columns: list[npt.NDArray[Any]] = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    return CopyTable(columns[0].astype(np.int32), *columns[1:])


def _random_case(random: np.random.Generator, align: int, source: Bytes, want: Bytes, target: int) -> CopyTable:
    """Tiles from ``source`` (a region of its own) to ascending places after address ``target``; fills ``want`` as they should."""
    rows, place = [], 0
    for _ in range(int(random.integers(1, 9))):
        size = max(align, int(random.choice(_RUNS)) // align * align)
        count = min(int(random.choice([1, 2, 3, 17, 300])), max(1, 600_000 // size))
        pitch = size + align * int(random.integers(0, 3))
        step = size + align * int(random.integers(0, 3))
        first = int(random.integers(0, (len(source) - count * pitch - align) // align)) * align
        if place + count * step > len(want):
            break
        for run in range(count):
            want[place + run * step : place + run * step + size] = source[first + run * pitch : first + run * pitch + size]
        rows.append((0, first, pitch, target + place, step, count, size))
        place += count * step + align * int(random.integers(0, 4))
    return _tiles(*rows)


@pytest.mark.gpu
@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
def test_tiles_arrive_and_nothing_else_is_touched(seed: int, align: int) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from weightsync.tensors.cuda.copies import TileCopy

    random = np.random.default_rng(seed)
    for _ in range(12):
        source = random.integers(0, 256, _ROOM, np.uint8)
        here = random.integers(0, 256, _ROOM, np.uint8)
        want = here.copy()
        shift = 0 if align == 16 else int(random.integers(0, 16 // align)) * align
        there = torch.from_numpy(source).cuda()
        target = torch.from_numpy(here).cuda()
        tiles = _random_case(random, align, source, want[shift:], target.data_ptr() + shift)
        copy = TileCopy([[(tiles, [there.data_ptr()])]], target.device)
        assert copy.nbytes == tiles.nbytes
        copy.launch()
        assert np.array_equal(target.cpu().numpy(), want)


@pytest.mark.gpu
def test_groups_can_be_copied_one_at_a_time() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from weightsync.tensors.cuda.copies import TileCopy

    source = torch.randint(0, 256, (3 << 16,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    groups = [[(_tiles((0, k << 16, 0, target.data_ptr() + (k << 16), 0, 1, 1 << 16)), [source.data_ptr()])] for k in range(3)]
    copy = TileCopy(groups, source.device)
    copy.launch(1, 2)
    assert not target[: 1 << 16].any() and not target[2 << 16 :].any()
    assert torch.equal(target[1 << 16 : 2 << 16], source[1 << 16 : 2 << 16])
    copy.launch()
    assert torch.equal(source, target)


def test_no_tile_is_above_the_limit_and_none_is_lost(seed: int) -> None:
    random = np.random.default_rng(seed)
    source, want = random.integers(0, 256, _ROOM, np.uint8), np.zeros(_ROOM, np.uint8)
    tiles = _random_case(random, 1, source, want, 1 << 40)
    table = DeviceCopyTable.build([[(tiles, [1 << 41])], []])
    sizes = (table.columns[3] >> 32) * (table.columns[3] & 0xFFFFFFFF)
    assert sizes.max() <= TILE_BYTES and sizes.sum() == tiles.nbytes == table.nbytes
    assert table.first.tolist() == [0, len(table), len(table)]


def test_strides_of_gigabytes_are_cut_into_runs() -> None:
    columns = DeviceCopyTable.build([[(_tiles((0, 64, 3 << 32, 128, 48, 4, 48)), [0])]]).columns
    assert columns[0].tolist() == [64 + run * (3 << 32) for run in range(4)]
    assert columns[1].tolist() == [128 + run * 48 for run in range(4)]
    assert columns[2].tolist() == [0] * 4 and columns[3].tolist() == [1 << 32 | 48] * 4


def test_one_owner_in_order_several_mixed_the_same_way_every_time() -> None:
    one = _tiles(*[(0, k << 16, 0, k << 16, 0, 1, 1 << 16) for k in reversed(range(64))])
    other = _tiles(*[(0, k << 16, 0, (64 + k) << 16, 0, 1, 1 << 16) for k in range(16)])
    assert DeviceCopyTable.build([[(one, [0])]]).columns[1].tolist() == [k << 16 for k in range(64)]
    mixed = DeviceCopyTable.build([[(one, [0]), (other, [1 << 40])]]).columns
    assert np.array_equal(mixed, DeviceCopyTable.build([[(one, [0]), (other, [1 << 40])]]).columns)
    far = np.flatnonzero(mixed[0] >= 1 << 40)
    assert len(far) == 16 and far.min() < 20 and far.max() > 60
    assert sorted(mixed[1].tolist()) == [k << 16 for k in range(80)]


def test_a_region_without_an_address_is_refused() -> None:
    with pytest.raises(ProtocolError, match="region"):
        DeviceCopyTable.build([[(_tiles((1, 0, 0, 0, 0, 1, 8)), [0])]])
