"""Covers: layouts that partition every tensor and those that do not; digests added up, compared, and attributed to ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.planning.simulation import contents, digests_of, layout_of, spec, whole

from weightsync.errors import LayoutError, VerificationError
from weightsync.model import Layout, Manifest
from weightsync.planning.coverage import coverage_of
from weightsync.planning.split import split_rows
from weightsync_bench.sharding import fsdp, sharded, tensor_parallel

MODEL = Manifest(
    [
        spec("model.layers.0.self_attn.q_proj.weight", 8, 4),
        spec("model.layers.0.self_attn.o_proj.weight", 4, 8, dtype="bfloat16"),
        spec("model.layers.0.input_layernorm.weight", 5, dtype="bfloat16"),
        spec("scale", dtype="float64"),
        spec("nothing", 0, 3),
    ]
)


def named(layouts: list[Layout]) -> dict[str, Layout]:
    return {f"rank-{index}": layout for index, layout in enumerate(layouts)}


def both(manifest: Manifest) -> list[dict[str, Layout]]:
    dims = np.full(len(manifest), -1)
    dims[[len(one.shape) == 2 for one in manifest]] = manifest.dims - 1
    last = [sharded(manifest, [(dims, index, 3)]) for index in range(3)]
    return [named(fsdp(manifest, 2)), named(fsdp(manifest, 2) * 2), named(fsdp(manifest, 7)), named(last), named([whole(manifest)])]


def digests(layouts: dict[str, Layout], seed: int = 3) -> dict[str, npt.NDArray[np.uint64]]:
    tensors = contents(MODEL, seed)
    return {name: digests_of(MODEL, layout, tensors) for name, layout in layouts.items()}


def test_all_shardings_of_the_same_bytes_add_up_to_the_same() -> None:
    expected = digests_of(MODEL, whole(MODEL), contents(MODEL, 3))
    sides = both(MODEL)
    sides += [
        named(tensor_parallel(MODEL, 2)),
        {n: split_rows(MODEL, lay, 8) for n, lay in named(tensor_parallel(MODEL, 2)).items()},
    ]
    for layouts in sides:
        made = coverage_of(MODEL, layouts, "here")
        total = made.total(digests(layouts))
        assert int(total[MODEL.index["nothing"]]) == 0
        assert np.delete(total, MODEL.index["nothing"]).tolist() == expected.tolist()
        made.check(digests(layouts), total)


def test_a_changed_byte_names_the_tensor_and_its_ranks() -> None:
    layouts = named(fsdp(MODEL, 2))
    made = coverage_of(MODEL, layouts, "replica r0")
    expected = made.total(digests(layouts))
    wrong = digests(layouts)
    row = int(np.flatnonzero(layouts["rank-1"].tensor == MODEL.index["model.layers.0.self_attn.o_proj.weight"])[0])
    wrong["rank-1"][row] += 1
    with pytest.raises(
        VerificationError, match=r"replica r0: 1 of 5 .*published ones: model.layers.0.self_attn.o_proj.weight .on rank-0, rank-1"
    ):
        made.check(wrong, expected)


def test_at_most_ten_tensors_are_named() -> None:
    manifest = Manifest([spec(f"w{index}", 4) for index in range(25)])
    made = coverage_of(manifest, {"a": whole(manifest)}, "here")
    with pytest.raises(VerificationError, match=r"25 of 25 .*w9 \(on a\); and 15 more$") as caught:
        made.check({"a": np.ones(25, np.uint64)}, np.zeros(25, np.uint64))
    assert "w10" not in str(caught.value)


def test_sums_wrap_around() -> None:
    manifest = Manifest([spec("w", 4)])
    made = coverage_of(manifest, named(fsdp(manifest, 2)), "here")
    assert made.total({name: np.array([2**63 + 1], np.uint64) for name in ("rank-0", "rank-1")}).tolist() == [2]


def test_copies_that_diverged_are_found_whatever_they_add_up_to() -> None:
    layouts = named(fsdp(MODEL, 2) * 2)  # rank-0 and rank-2 hold the same, as do rank-1 and rank-3
    made = coverage_of(MODEL, layouts, "the trainer")
    good = digests(layouts)
    expected = made.total(good)
    for culprit, pair in (("rank-2", "rank-0, rank-2"), ("rank-1", "rank-1, rank-3")):
        wrong = digests(layouts)
        wrong[culprit][-2] ^= np.uint64(1 << 40)
        name = MODEL[int(layouts[culprit].tensor[-2])].name
        with pytest.raises(VerificationError, match=rf"the trainer: copies of 1 tensors have diverged.*: {name} .on {pair}"):
            made.check(wrong, expected)


def test_digests_must_be_complete() -> None:
    layouts = named(fsdp(MODEL, 2))
    made = coverage_of(MODEL, layouts, "here")
    good = digests(layouts)
    with pytest.raises(VerificationError, match="missing from rank-1; unexpected from rank-9"):
        made.total({"rank-0": good["rank-0"], "rank-9": good["rank-1"]})
    with pytest.raises(VerificationError, match="rank-1 reported"):
        made.total(good | {"rank-1": good["rank-1"][:-1]})
    with pytest.raises(VerificationError, match="for a manifest of"):
        made.check(good, np.zeros(2, np.uint64))


@pytest.mark.parametrize(
    ("missing", "region"),
    [(0, r"\[0:3\]"), (1, r"\[3:6\]"), (2, r"\[6:7\]")],
)
def test_a_missing_rank_is_a_hole(missing: int, region: str) -> None:
    manifest = Manifest([spec(f"w{index}", 7) for index in range(12)])
    layouts = named(fsdp(manifest, 3))
    del layouts[f"rank-{missing}"]
    with pytest.raises(
        LayoutError, match=rf"here: .* 12 tensors are wrong:\n  w0: no rank holds {region}; the rest is on rank(?s:.)*and 2 more"
    ):
        coverage_of(manifest, layouts, "here")


def test_holes_inside_and_tensors_that_nobody_holds() -> None:
    manifest = Manifest([spec("a", 4, 6), spec("b", 2), spec("c")])
    shards = [("a", (0, 0), (4, 2)), ("a", (0, 2), (1, 6)), ("a", (2, 2), (4, 6)), ("b", (0,), (2,))]
    with pytest.raises(LayoutError) as caught:
        coverage_of(manifest, {"x": layout_of(manifest, shards)}, "here")
    assert "2 tensors are wrong" in str(caught.value)
    assert "a: no rank holds [1:2, 2:6]" in str(caught.value)
    assert "c: no rank holds []" in str(caught.value)
    with pytest.raises(LayoutError, match="3 tensors are wrong"):
        coverage_of(manifest, {}, "here")


def test_equal_boxes_of_unequal_shapes() -> None:
    """Two tensors are cut alike, but one of them is longer."""
    manifest = Manifest([spec("a", 4), spec("b", 6)])
    with pytest.raises(LayoutError, match=r"1 tensors are wrong:\n  b: no rank holds \[4:6\]"):
        coverage_of(manifest, {"x": layout_of(manifest, [("a", (0,), (4,)), ("b", (0,), (4,))])}, "here")


def test_overlaps_name_both_boxes_and_all_their_holders() -> None:
    manifest = Manifest([spec("a", 4, 6), spec("b", 2)])
    left = layout_of(manifest, [("a", (0, 0), (4, 4)), ("b", (0,), (2,))])
    right = layout_of(manifest, [("a", (0, 3), (4, 6))])
    with pytest.raises(LayoutError, match=r"1 tensors(?s:.)*a: .*overlap.*\[0:4, 0:4\] on l1, l2 and \[0:4, 3:6\] on r"):
        coverage_of(manifest, {"l1": left, "r": right, "l2": left}, "here")


def test_an_overlap_and_a_hole_of_equal_volume() -> None:
    """Volumes add up, and yet an element is missing and another there twice."""
    manifest = Manifest([spec("a", 4)])
    with pytest.raises(LayoutError, match="overlap"):
        coverage_of(manifest, {"x": layout_of(manifest, [("a", (0,), (2,)), ("a", (1,), (3,))])}, "here")


def test_a_box_inside_another() -> None:
    manifest = Manifest([spec("a", 9, 9)])
    with pytest.raises(LayoutError, match=r"\[0:9, 0:9\] on x and \[4:5, 4:5\] on y"):
        coverage_of(manifest, {"x": whole(manifest), "y": layout_of(manifest, [("a", (4, 4), (5, 5))])}, "here")


def test_many_overlapping_boxes_end_soon() -> None:
    """All pairs of 20,000 nested boxes would be 400 million: one is enough to know."""
    manifest = Manifest([spec("a", 40_000), spec("b", 3), spec("c", 40_000)])
    ends = np.arange(20_000)
    starts = np.concatenate([np.zeros(20_000, np.int64), [0], ends])[:, None]
    stops = np.concatenate([ends + 1, [3], ends + 20_001])[:, None]
    tensor = np.repeat(np.arange(3, dtype=np.int32), [20_000, 1, 20_000])
    count = len(tensor)
    layout = Layout(
        manifest, tensor, starts, stops, np.zeros(count, np.int32), np.zeros(count, np.int64), np.full((count, 1), 4), (1 << 20,)
    )
    with pytest.raises(LayoutError, match="2 tensors are wrong"):
        coverage_of(manifest, {"x": layout}, "here")


def test_the_order_of_members_does_not_matter() -> None:
    layouts = named(fsdp(MODEL, 2) * 2)
    turned = dict(reversed(layouts.items()))
    assert (
        coverage_of(MODEL, layouts, "x").total(digests(layouts)).tolist()
        == coverage_of(MODEL, turned, "x").total(digests(turned)).tolist()
    )


def test_one_rank_may_hold_a_box_twice() -> None:
    manifest = Manifest([spec("a", 4)])
    made = coverage_of(manifest, {"x": layout_of(manifest, [("a", (0,), (4,)), ("a", (0,), (4,))])}, "here")
    assert made.total({"x": np.array([5, 5], np.uint64)}).tolist() == [5]
    with pytest.raises(VerificationError, match="diverged"):
        made.total({"x": np.array([5, 6], np.uint64)})
