"""Plans of known shardings: what each target gets from whom, executed on bytes; and layouts that cannot be planned."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planning.simulation import HERE, check_plan, layout_of, ranks_of, source_bytes, spec, targets_of, whole

from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.planning.plan import Plan, plan_transfer
from weightsync.planning.split import split_rows
from weightsync.protocol.messages import Host
from weightsync_bench.sharding import expert_parallel, fsdp, sharded, tensor_parallel


def named(layouts: list[Layout], prefix: str) -> dict[str, Layout]:
    return {f"{prefix}{index}": layout for index, layout in enumerate(layouts)}


def planned(manifest: Manifest, sources: list[Layout], targets: list[Layout]) -> Plan:
    plan = plan_transfer(manifest, ranks_of(named(sources, "s")), targets_of(named(targets, "t")))
    check_plan(manifest, plan)
    return plan


def rows_of(plan: Plan, member: str) -> list[tuple[str, list[int], list[int]]]:
    pieces = plan.pieces(member)
    return [
        (pieces.sources[source], starts, stops)
        for source, starts, stops in zip(pieces.source.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), strict=True)
    ]


BLOCK = Manifest(
    [
        spec("model.layers.0.self_attn.q_proj.weight", 8, 4),
        spec("model.layers.0.self_attn.o_proj.weight", 4, 8, dtype="bfloat16"),
        spec("model.layers.0.input_layernorm.weight", 4, dtype="bfloat16"),
        spec("lm_head.weight", 6, 4, dtype="float16"),
    ]
)


def test_two_way_tensor_parallel_to_one_and_back() -> None:
    two, one = tensor_parallel(BLOCK, 2), [whole(BLOCK)]
    merged = planned(BLOCK, two, one)
    lm_head = [row for row, index in zip(rows_of(merged, "t0"), merged.pieces("t0").target_row, strict=True) if index == 0]
    assert lm_head == [("s0", [0, 0], [3, 4]), ("s1", [3, 0], [6, 4])]
    divided = planned(BLOCK, one, two)
    assert source_bytes(divided) == {"s0": sum(layout.nbytes(BLOCK) for layout in two)}


def test_uneven_chunks_and_empty_shards() -> None:
    manifest = Manifest([spec("a", 5, 3), spec("b", 3), spec("c", 7, 2, dtype="int64")])
    sources = fsdp(manifest, 4)  # torch.chunk: 2 2 1 and nothing, 1 1 1 and nothing, 2 2 2 1
    assert [len(layout) for layout in sources] == [3, 3, 3, 1]
    planned(manifest, sources, fsdp(manifest, 3))
    planned(manifest, sources, [whole(manifest)])


def test_a_target_without_rows_gets_nothing() -> None:
    manifest = Manifest([spec("a", 2)])
    plan = planned(manifest, [whole(manifest)], fsdp(manifest, 3))
    assert plan.nbytes("t2") == 0
    assert len(plan.pieces("t2")) == 0
    assert plan.pieces("t2").sources == ()


def test_scalars_and_zero_size_tensors() -> None:
    manifest = Manifest([spec("scale", dtype="float64"), spec("empty", 0, 4), spec("middle", 3, 0), spec("w", 2, 2)])
    plan = planned(manifest, [whole(manifest)], [whole(manifest), whole(manifest, transposed=True)])
    assert plan.nbytes("t0") == 8 + 16


def test_a_manifest_without_tensors() -> None:
    manifest = Manifest([])
    plan = plan_transfer(manifest, ranks_of({"s": whole(manifest)}), targets_of({"t": whole(manifest)}))
    assert len(plan.pieces("t")) == 0
    assert source_bytes(plan) == {"s": 0}


def test_transposed_memory_on_either_side() -> None:
    manifest = Manifest([spec("w", 4, 6), spec("conv", 2, 3, 2, dtype="bfloat16")])
    rows = [layout_of(manifest, [("w", (0, 0), (3, 6)), ("conv", (0, 0, 0), (2, 1, 2))], transposed=True, gap=6)]
    rows += [layout_of(manifest, [("w", (3, 0), (4, 6)), ("conv", (0, 1, 0), (2, 3, 2))])]
    columns = [layout_of(manifest, [("w", (0, c), (4, c + 3)), ("conv", (0, 0, c // 3), (2, 3, c // 3 + 1))]) for c in (0, 3)]
    planned(manifest, rows, columns)
    planned(manifest, columns, rows)


def test_fsdp_by_tensor_parallel_strided_shards() -> None:
    first = np.array([BLOCK.dims - max(len(one.shape), 1) for one in BLOCK])
    last = np.where([len(one.shape) == 2 for one in BLOCK], BLOCK.dims - 1, -1)
    # (tensor parallel first, then FSDP within its part), as DTensor's strided shards; and crossed dimensions
    strided = [sharded(BLOCK, [(first, tp, 2), (first, dp, 2)]) for dp in range(2) for tp in range(2)]
    crossed = [sharded(BLOCK, [(last, tp, 2), (first, dp, 3)]) for dp in range(3) for tp in range(2)]
    for sources in (strided, crossed):
        for targets in (strided, crossed, tensor_parallel(BLOCK, 2)):
            planned(BLOCK, sources, targets)


def test_fused_parameters_are_regions_of_one_memory() -> None:
    """The q, k and v of an engine rank lie one after the other in one parameter; gate and up as well."""
    manifest = Manifest([spec("q", 4, 2), spec("k", 2, 2), spec("v", 2, 2)])
    starts = np.array([[1, 0], [2, 0], [1, 0]], np.int64)  # canonical order: k, q, v; rank 1 of 2
    stops = np.array([[2, 2], [4, 2], [2, 2]], np.int64)
    offset = np.array([16, 0, 24], np.int64)
    fused = Layout(
        manifest,
        np.arange(3, dtype=np.int32),
        starts,
        stops,
        np.zeros(3, np.int32),
        offset,
        np.array([[8, 4]] * 3, np.int64),
        (32,),
    )
    planned(manifest, fsdp(manifest, 3), [fused])


def test_one_checkpoint_tensor_installed_twice() -> None:
    """An engine that keeps the tied head apart from the embedding has two equal rows: each is filled."""
    manifest = Manifest([spec("embed", 4, 2)])
    twice = layout_of(manifest, [("embed", (0, 0), (4, 2)), ("embed", (0, 0), (4, 2))])
    plan = planned(manifest, fsdp(manifest, 2), [twice])
    assert plan.nbytes("t0") == 2 * manifest.nbytes


def test_experts_move_whole() -> None:
    manifest = Manifest([spec(f"model.layers.0.mlp.experts.{e}.down_proj.weight", 4, 2) for e in range(12)])
    targets = expert_parallel(manifest, 3)
    assert [layout.tensor.tolist() for layout in targets] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    plan = planned(manifest, fsdp(manifest, 2), targets)
    assert [len(plan.pieces(f"t{index}")) for index in range(3)] == [8, 8, 8]


def hybrid(manifest: Manifest, copies: int, shards: int) -> list[Layout]:
    return fsdp(manifest, shards) * copies


def test_copies_are_read_once_and_equally() -> None:
    manifest = Manifest([spec(f"layers.{index}.w", 8, 16) for index in range(50)])
    plan = planned(manifest, hybrid(manifest, 3, 2), [split_rows(manifest, layout, 64) for layout in tensor_parallel(manifest, 2)])
    load = source_bytes(plan)
    assert sum(load.values()) == 2 * manifest.nbytes  # both targets hold everything: no rule cuts these names
    for shard in range(2):
        shares = [load[f"s{copy * 2 + shard}"] for copy in range(3)]
        assert max(shares) - min(shares) <= 2 * 64
    # whole targets stick to few copies: 2 targets of 3 copies means at most 2 copies of each shard for one target
    assert all(len(plan.pieces(f"t{index}").sources) <= 4 for index in range(2))


def test_a_source_that_holds_a_box_twice_gets_no_double_share() -> None:
    manifest = Manifest([spec(f"w{index}", 4) for index in range(10)])
    twice = layout_of(manifest, [(one.name, (0,), (4,)) for one in manifest for _ in range(2)])
    plan = plan_transfer(manifest, ranks_of({"a": twice, "b": whole(manifest)}), targets_of({"t": whole(manifest)}))
    check_plan(manifest, plan)
    assert source_bytes(plan) == {"a": 80, "b": 80}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([Host("a", "a/0"), Host("a", "a/1"), Host("b", "b/0")], {"s0"}),
        ([Host("c", "c/0"), Host("a", "a/1"), Host("b", "b/0")], {"s1"}),
        ([Host("c", "c/0"), Host("d", "a/0"), Host("a", "b/0")], {"s1"}),
        ([Host("c", "c/0"), Host("c", "c/1"), Host("b", "b/0")], {"s0", "s1", "s2"}),
    ],
    ids=["same memory", "same machine", "memory before name", "anybody"],
)
def test_near_sources_are_preferred(hosts: list[Host], expected: set[str]) -> None:
    manifest = Manifest([spec(f"w{index}", 4, 4) for index in range(9)])
    layouts = named([whole(manifest)] * 3, "s")
    plan = plan_transfer(
        manifest,
        ranks_of(layouts, dict(zip(layouts, hosts, strict=True))),
        targets_of({"t": whole(manifest)}, {"t": Host("a", "a/0")}),
    )
    check_plan(manifest, plan)
    assert set(plan.pieces("t").sources) == expected
    assert {name for name, load in source_bytes(plan).items() if load} == expected


def test_a_near_source_is_preferred_even_for_a_part() -> None:
    """Only half of the tensor is held nearby: that half comes from there, the rest from afar."""
    manifest = Manifest([spec("w", 4, 4)])
    top, bottom = fsdp(manifest, 2)
    sources = {"far-top": top, "far-bottom": bottom, "near-top": top}
    hosts = {"far-top": Host("b", "b"), "far-bottom": Host("b", "b"), "near-top": HERE}
    plan = plan_transfer(manifest, ranks_of(sources, hosts), targets_of({"t": whole(manifest)}))
    check_plan(manifest, plan)
    assert source_bytes(plan) == {"far-bottom": 32, "far-top": 0, "near-top": 32}


def test_order_of_members_does_not_matter() -> None:
    sources, targets = named(hybrid(BLOCK, 2, 2), "s"), named(tensor_parallel(BLOCK, 2), "t")
    one = plan_transfer(BLOCK, ranks_of(sources), targets_of(targets))
    other = plan_transfer(BLOCK, ranks_of(sources)[::-1], targets_of(targets)[::-1])
    assert one.digest == other.digest
    assert [one.pieces(name).digest for name in targets] == [other.pieces(name).digest for name in targets]
    assert one.pieces("t0").sources == other.pieces("t0").sources


def test_the_digest_names_everything() -> None:
    sources, targets = named(fsdp(BLOCK, 2), "s"), named(tensor_parallel(BLOCK, 2), "t")
    plans = [
        plan_transfer(BLOCK, ranks_of(sources), targets_of(targets)),
        plan_transfer(BLOCK, ranks_of(named(fsdp(BLOCK, 3), "s")), targets_of(targets)),
        plan_transfer(BLOCK, ranks_of(sources), targets_of({"t0": targets["t0"]})),
        plan_transfer(BLOCK, ranks_of(sources), targets_of({"t0": targets["t0"], "x": targets["t1"]})),
        plan_transfer(BLOCK, ranks_of(sources, {"s1": Host("here", "here/1")}), targets_of(targets)),
        plan_transfer(BLOCK, ranks_of(sources), targets_of(targets, {"t1": Host("there", "here/0")})),
        plan_transfer(BLOCK, ranks_of(sources), targets_of({n: split_rows(BLOCK, lay, 16) for n, lay in targets.items()})),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_elements_that_nobody_holds() -> None:
    manifest = Manifest([spec(f"layers.{index}.w", 4, 4) for index in range(30)])
    top, _ = fsdp(manifest, 2)
    with pytest.raises(LayoutError, match=r"30 tensors.*(?s:.)*layers.0.w: \[2:4, 0:4\], needed by t\n(?s:.)*and 20 more"):
        plan_transfer(manifest, ranks_of({"s": top}), targets_of({"t": whole(manifest)}))
    with pytest.raises(LayoutError, match=r"\[0:4, 0:4\]"):
        plan_transfer(manifest, [], targets_of({"t": whole(manifest)}))


def test_sources_that_overlap() -> None:
    manifest = Manifest([spec("w", 4, 4), spec("v", 4)])
    one = layout_of(manifest, [("w", (0, 0), (3, 4)), ("v", (0,), (4,))])
    two = layout_of(manifest, [("w", (2, 0), (4, 4))])
    with pytest.raises(LayoutError, match=r"1 tensors:\n  w: .*\[0:3, 0:4\] on a and \[2:4, 0:4\] on b"):
        plan_transfer(manifest, ranks_of({"a": one, "b": two}), targets_of({"t": whole(manifest)}))


def test_layouts_of_another_manifest_and_members_named_twice() -> None:
    other = Manifest([spec("w", 4, 4, 2)])
    with pytest.raises(LayoutError, match="another manifest"):
        plan_transfer(BLOCK, ranks_of({"s": whole(other)}), [])
    with pytest.raises(LayoutError, match="twice: s"):
        plan_transfer(BLOCK, ranks_of({"s": whole(BLOCK)}) * 2, [])
