"""Shards that are gathered in groups: every bit arrives, with the digests of the rows, whatever the groups are cut from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.tensors.samples import DTYPES, MEMORIES, random_bits, raw, stored

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded
from weightsync.publishing.copied_shards import GatheredRows, chunks
from weightsync.tensors.digest import digest_box
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import shard, shards_of

NEVER = np.zeros(1, np.int8)
SHAPES: tuple[tuple[int, ...], ...] = ((), (33,), (3, 5), (2, 3, 4), (0, 4), (5, 0), (2, 1, 3, 9), (3, 8200), (7, 64, 30))


@pytest.mark.parametrize("group_bytes", [64, 5_000, 1 << 20])
@pytest.mark.parametrize("memory", MEMORIES)
def test_every_bit_arrives_with_its_digest(group_bytes: int, memory: str) -> None:
    generator = np.random.default_rng(7)
    state = {f"{i}.{dtype}": stored(random_bits(shape, dtype, generator), memory)
             for i, shape in enumerate(SHAPES) for dtype in DTYPES if group_bytes > 64 or i < 6}  # fmt: skip
    manifest, shards = shards_of(state)
    layout = packed_layout(manifest, shards)
    region = np.zeros(layout.regions[0], np.uint8)
    rows = range(0, len(shards), 2)
    gathered = GatheredRows(manifest, shards, layout, region.ctypes.data, rows, torch.device("cpu"), group_bytes)
    for _ in range(2):
        digests = np.zeros(len(shards), np.uint64)
        gathered.place(digests, NEVER, None)
        for row, one in enumerate(shards):
            first, expected = int(layout.offset[row]), raw(state[one.name]).reshape(-1)
            if row in rows:
                assert np.array_equal(region[first : first + expected.size], expected), one.name
                assert int(digests[row]) == digest_box(state[one.name], one.shape, one.box.starts), one.name
            else:
                assert not digests[row] and not region[first : first + expected.size].any(), "another's row"
        for tensor in state.values():  # the next version
            tensor.copy_(random_bits(tuple(tensor.shape), tensor.dtype, generator))


def test_a_part_of_a_box_has_its_place_in_the_whole_tensor() -> None:
    whole = torch.randn(6, 7, 5)
    one = shard("t", whole[2:5, :, 1:4], (6, 7, 5), (2, 0, 1))
    manifest, _ = shards_of({"t": whole})
    layout = packed_layout(manifest, [one])
    region, digests = np.zeros(layout.regions[0], np.uint8), np.zeros(1, np.uint64)
    GatheredRows(manifest, [one], layout, region.ctypes.data, [0], torch.device("cpu"), 40).place(digests, NEVER, None)
    assert int(digests[0]) == digest_box(one.tensor, one.shape, one.box.starts)
    assert np.array_equal(region[: 4 * one.tensor.numel()].view(np.float32), one.tensor.reshape(-1).numpy())


def test_it_stops_when_told_and_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, shards = shards_of({f"t{index}": torch.zeros(1 << 18) for index in range(4)})
    layout = packed_layout(manifest, shards)
    region = np.zeros(layout.regions[0], np.uint8)
    gathered = GatheredRows(manifest, shards, layout, region.ctypes.data, range(4), torch.device("cpu"), 1 << 20)
    digests = np.zeros(4, np.uint64)
    gathered.place(digests, np.ones(1, np.int8), None)
    assert not digests.any()
    expired = Deadline(1e-6)
    while expired.left:
        pass
    with pytest.raises(DeadlineExceeded):
        gathered.place(digests, NEVER, expired)
    stop = np.zeros(1, np.int8)
    copy = torch._foreach_copy_

    def stopping(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        stop[0] = 1

    monkeypatch.setattr(torch, "_foreach_copy_", stopping)
    gathered.place(digests, stop, None)
    assert not digests.any()  # its owner raises


@pytest.mark.parametrize("shape", [(), (9,), (3, 5), (4, 2, 7), (2, 3, 2, 5), (0, 3)])
@pytest.mark.parametrize("most", [1, 4, 15, 1000])
def test_chunks_cover_a_tensor_in_order(shape: tuple[int, ...], most: int) -> None:
    numbers = torch.arange(int(np.prod(shape, dtype=np.int64))).view(shape)
    parts = [numbers[cut].reshape(-1) for cut in chunks(shape, most)]
    assert torch.equal(torch.cat([numbers.new_empty(0), *parts]), numbers.reshape(-1))
    assert all(len(part) <= most for part in parts) or not shape


@pytest.mark.parametrize("first", [torch.bfloat16, torch.uint8])
def test_a_wider_row_after_one_that_was_cut_at_an_odd_place(first: torch.dtype) -> None:
    state = {"a": torch.ones(1000, 1001).to(first), "b": torch.randn(128)}
    manifest, shards = shards_of(state)
    layout = packed_layout(manifest, shards)
    region, digests = np.zeros(layout.regions[0], np.uint8), np.zeros(2, np.uint64)
    GatheredRows(manifest, shards, layout, region.ctypes.data, range(2), torch.device("cpu")).place(digests, NEVER, None)
    for row, one in enumerate(shards):
        assert int(digests[row]) == digest_box(one.tensor, one.shape, one.box.starts)
