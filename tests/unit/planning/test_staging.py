"""Cutting layouts into blocks, and packing whole tensors into buckets."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planning.simulation import check_plan, layout_of, ranks_of, spec, targets_of, whole

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.model import Layout, Manifest
from weightsync.planning import buckets
from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import coverage_of
from weightsync.planning.plan import plan_transfer
from weightsync.planning.split import split_rows
from weightsync_bench.shapes import qwen3_30b_a3b
from weightsync_bench.sharding import fsdp, tensor_parallel


def boxes(manifest: Manifest, layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.starts, box.stops) for box in (layout.box(row, manifest) for row in range(len(layout)))]


@pytest.mark.parametrize(
    ("shape", "most", "expected"),
    [
        ((4, 4), 64, [((0, 0), (4, 4))]),  # exactly as large as allowed
        ((4, 4), 63, [((0, 0), (2, 4)), ((2, 0), (4, 4))]),  # three rows would fit: two blocks of two are more even
        ((5, 4), 32, [((0, 0), (2, 4)), ((2, 0), (4, 4)), ((4, 0), (5, 4))]),
        ((2, 5), 12, [((0, 0), (1, 3)), ((0, 3), (1, 5)), ((1, 0), (2, 3)), ((1, 3), (2, 5))]),  # one row is too large
        ((1, 2, 3), 12, [((0, 0, 0), (1, 1, 3)), ((0, 1, 0), (1, 2, 3))]),
        ((2,), 1, [((0,), (1,)), ((1,), (2,))]),  # an element is never cut
        ((), 1, [((), ())]),
    ],
)
def test_blocks_of_a_shape(shape: tuple[int, ...], most: int, expected: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    manifest = Manifest([spec("w", *shape)])
    assert boxes(manifest, split_rows(manifest, whole(manifest), most)) == expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("most", [1, 7, 24, 48, 100, 1 << 20])
def test_blocks_are_the_same_bytes(most: int, transposed: bool) -> None:
    manifest = Manifest(
        [spec("a", 3, 5, 2), spec("b", 7, dtype="bfloat16"), spec("c", dtype="int64"), spec("d", 0, 2), spec("e", 4, 4)]
    )
    shards = [("a", (1, 0, 0), (3, 5, 2)), ("b", (2,), (7,)), ("c", (), ()), ("e", (0, 1), (4, 3))]
    layout = layout_of(manifest, shards, transposed, gap=8)
    blocks = split_rows(manifest, layout, most)
    sizes = blocks.sizes() * manifest.itemsizes[blocks.tensor]
    assert np.all((sizes <= most) | (blocks.sizes() == 1))
    assert np.all(np.diff(blocks.tensor) >= 0)
    assert blocks.nbytes(manifest) == layout.nbytes(manifest)
    assert blocks.regions == layout.regions
    # every element of the blocks lies where the layout has it
    for row in range(len(blocks)):
        old = int(blocks.region[row])  # one region a shard here
        moved = (blocks.starts[row] - layout.starts[old]) @ layout.strides[old]
        assert blocks.offset[row] == layout.offset[old] + moved
        assert np.array_equal(blocks.strides[row], layout.strides[old])
    plan = plan_transfer(manifest, ranks_of({"s": whole(manifest)}), targets_of({"t": blocks}))
    check_plan(manifest, plan)


def test_equal_boxes_stay_equal_wherever_they_lie() -> None:
    manifest = Manifest([spec("w", 6, 6)])
    one = split_rows(manifest, whole(manifest), 40)
    two = split_rows(manifest, layout_of(manifest, [("w", (0, 0), (6, 6))], transposed=True, gap=16), 40)
    assert boxes(manifest, one) == boxes(manifest, two)
    coverage_of(manifest, {"one": one, "two": two}, "here")


def test_what_cannot_be_cut() -> None:
    manifest = Manifest([spec("w", 1 << 40)])
    layout = Layout(
        manifest,
        np.zeros(1, np.int32),
        np.zeros((1, 1), np.int64),
        np.full((1, 1), 1 << 40),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        np.full((1, 1), 4),
        (1 << 42,),
    )
    with pytest.raises(LayoutError, match="more than"):
        split_rows(manifest, layout, 1024)
    for nonsense in (0, -1):
        with pytest.raises(ConfigurationError, match="max_bytes"):
            split_rows(manifest, layout, nonsense)


def test_an_empty_layout_has_no_blocks() -> None:
    manifest = Manifest([spec("w", 2)])
    empty = layout_of(manifest, [])
    assert len(split_rows(manifest, empty, 1)) == 0


PACKED = [
    # sizes in bytes, bucket, alignment -> (region, offset) of each, bytes of the regions
    ([16, 16, 16], 48, 16, [(0, 0), (0, 16), (0, 32)], (48,)),  # exactly full
    ([16, 16, 16], 47, 16, [(0, 0), (0, 16), (1, 0)], (32, 16)),
    ([5, 5, 5], 21, 8, [(0, 0), (0, 8), (0, 16)], (21,)),  # the last one's padding needs no room
    ([5, 5, 5], 20, 8, [(0, 0), (0, 8), (1, 0)], (13, 5)),
    ([100, 4, 4], 50, 8, [(0, 0), (1, 0), (1, 8)], (100, 12)),  # larger than a bucket: alone
    ([4, 100, 4], 50, 8, [(0, 0), (1, 0), (2, 0)], (4, 100, 4)),
    ([4, 100, 200, 4], 50, 8, [(0, 0), (1, 0), (2, 0), (3, 0)], (4, 100, 200, 4)),  # several in a row
    ([50, 50], 50, 8, [(0, 0), (1, 0)], (50, 50)),
    ([0, 8, 0, 8, 0], 16, 8, [(0, 0), (0, 8)], (16,)),  # zero-size tensors have no row
    ([], 16, 8, [], ()),
    ([0], 16, 8, [], ()),
]


@pytest.mark.parametrize(("sizes", "bucket", "alignment", "places", "regions"), PACKED)
def test_packing(
    sizes: list[int],
    bucket: int,
    alignment: int,
    places: list[tuple[int, int]],
    regions: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "_ALIGNMENT", alignment)
    manifest = Manifest([spec(f"w{index}", size, dtype="uint8") for index, size in enumerate(sizes)])
    layout = staging_layout(manifest, bucket)
    assert list(zip(layout.region.tolist(), layout.offset.tolist(), strict=True)) == places
    assert layout.regions == regions


def test_staged_tensors_are_whole_contiguous_and_aligned() -> None:
    manifest = Manifest(
        [spec("a", 3, 5), spec("b", dtype="int64"), spec("c", 2, 2, 2, dtype="bfloat16"), spec("d", 0, 1), spec("e", 9)]
    )
    layout = staging_layout(manifest, 2048)
    coverage_of(manifest, {"engine": layout}, "here")
    assert np.all(layout.offset % 512 == 0)
    assert layout.strides[layout.tensor == manifest.index["c"]].tolist() == [[8, 4, 2]]
    assert layout.strides[layout.tensor == manifest.index["a"], 1:].tolist() == [[20, 4]]
    plan = plan_transfer(manifest, ranks_of({f"s{i}": one for i, one in enumerate(fsdp(manifest, 2))}), targets_of({"t": layout}))
    check_plan(manifest, plan)


def test_real_buckets_of_128_mib() -> None:
    manifest = Manifest(qwen3_30b_a3b())
    bucket = 128 << 20
    layout = staging_layout(manifest, bucket)
    largest = 151936 * 2048 * 2
    assert layout.nbytes(manifest) == manifest.nbytes
    assert sorted(size for size in layout.regions if size > bucket) == [largest, largest]
    assert np.all(np.diff(layout.region) >= 0)
    full = [size for size in layout.regions if size <= bucket]
    assert sum(full) / len(full) > 0.9 * bucket
    assert max(staging_layout(manifest, 1 << 30).regions) <= 1 << 30


@pytest.mark.parametrize("bucket", [0, -5])
def test_nonsense(bucket: int) -> None:
    with pytest.raises(ConfigurationError):
        staging_layout(Manifest([spec("w", 2)]), bucket)


def test_tensor_parallel_blocks_of_a_real_model_are_a_cover() -> None:
    manifest = Manifest(qwen3_30b_a3b())
    layouts = {f"tp{index}": split_rows(manifest, layout, 1 << 20) for index, layout in enumerate(tensor_parallel(manifest, 4))}
    made = coverage_of(manifest, layouts, "replica")
    ones = {name: np.ones(len(layout), np.uint64) for name, layout in layouts.items()}
    counts = made.total(ones)
    assert int(counts[manifest.index["model.norm.weight"]]) == 1
    assert int(counts[manifest.index["lm_head.weight"]]) == 4 * 149  # 37,984 rows of 4 KiB, 256 at most in a block
