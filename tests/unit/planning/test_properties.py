"""Random models, meshes and dtypes: plans are complete, exactly once, in bounds, balanced, deterministic; covers add up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planning.simulation import check_plan, contents, digests_of, ranks_of, targets_of, whole

from weightsync.errors import LayoutError
from weightsync.model import ITEMSIZE, Layout, Manifest, TensorSpec
from weightsync.planning.box_index import BoxIndex, first_hole
from weightsync.planning.coverage import coverage_of
from weightsync.planning.plan import Plan, plan_transfer
from weightsync.planning.split import split_rows
from weightsync.protocol.messages import Host
from weightsync_bench.sharding import sharded

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """For each mesh dimension its size, and which dimension of each tensor it cuts (-1: a copy)."""

    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    block: int

    def layouts(self, manifest: Manifest, prefix: str) -> dict[str, Layout]:
        made = {}
        for number, places in enumerate(product(*map(range, self.sizes))):
            cuts = [
                (np.array(dims, np.int64), place, size) for dims, place, size in zip(self.cuts, places, self.sizes, strict=True)
            ]
            made[f"{prefix}{number}"] = split_rows(manifest, sharded(manifest, cuts), self.block)
        return made


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
    repeats = draw(st.integers(1, 3))  # some tensors of equal geometry
    dtypes = draw(st.lists(st.sampled_from(sorted(ITEMSIZE)), min_size=len(shapes), max_size=len(shapes)))
    pairs = list(zip(shapes, dtypes, strict=True)) * repeats
    return Manifest([TensorSpec(f"w.{index}", tuple(shape), dtype) for index, (shape, dtype) in enumerate(pairs)])


@st.composite
def meshes(draw: st.DrawFn, manifest: Manifest) -> Mesh:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    period = draw(st.sampled_from([1, 2, len(manifest)]))
    cuts = []
    for _ in sizes:
        drawn = draw(st.lists(st.integers(-1, 2), min_size=period, max_size=period))
        wanted = [drawn[index % period] for index in range(len(manifest))]
        # dimension d of a tensor, where it has one, in the padded columns
        ranks = [len(one.shape) for one in manifest]
        cuts.append(tuple(manifest.dims - rank + d if 0 <= d < rank else -1 for d, rank in zip(wanted, ranks, strict=True)))
    return Mesh(sizes, tuple(cuts), draw(st.sampled_from([8, 24, 1 << 20])))


HOSTS = [Host(f"machine-{index // 2}", f"machine-{index // 2}/{index}") for index in range(4)]


def tier(source: Host, target: Host) -> int:
    return 0 if source.memory == target.memory else 1 if source.name == target.name else 2


def drawn_plan(data: st.DataObject) -> tuple[Manifest, Plan]:
    manifest = data.draw(manifests())
    sources = data.draw(meshes(manifest)).layouts(manifest, "s")
    targets = data.draw(meshes(manifest)).layouts(manifest, "t")
    spread = data.draw(st.booleans())
    hosts = {name: data.draw(st.sampled_from(HOSTS)) if spread else HOSTS[0] for name in (*sources, *targets)}
    return manifest, plan_transfer(manifest, ranks_of(sources, hosts), targets_of(targets, hosts))


@settings(max_examples=80)
@given(st.data())
def test_plans_deliver_every_element_exactly_once(data: st.DataObject) -> None:
    manifest, plan = drawn_plan(data)
    check_plan(manifest, plan)


@settings(max_examples=80)
@given(st.data())
def test_plans_prefer_near_sources_and_balance_within_the_bound(data: st.DataObject) -> None:
    """The pools are computed here anew, by looking at every holder of every piece."""
    manifest, plan = drawn_plan(data)
    held: dict[tuple[int, bytes, bytes], list[str]] = {}
    for rank in plan.sources:
        for row in range(len(rank.layout)):
            key = (int(rank.layout.tensor[row]), rank.layout.starts[row].tobytes(), rank.layout.stops[row].tobytes())
            held.setdefault(key, []).append(rank.member)
    homes = {rank.member: rank.host for rank in plan.sources}
    boxes = {rank.member: rank.layout for rank in plan.sources}
    pools: dict[tuple[str, ...], dict[str, int]] = {}
    largest: dict[tuple[str, ...], int] = {}
    total = dict.fromkeys(homes, 0)
    for target in plan.targets:
        pieces = plan.pieces(target.member)
        for piece in range(len(pieces)):
            member = pieces.sources[pieces.source[piece]]
            tensor = int(target.layout.tensor[pieces.target_row[piece]])
            layout = boxes[member]
            mine = [
                row
                for row in range(len(layout))
                if layout.tensor[row] == tensor
                and np.all(layout.starts[row] <= pieces.starts[piece])
                and np.all(layout.stops[row] >= pieces.stops[piece])
            ]
            holders = held[tensor, layout.starts[mine[0]].tobytes(), layout.stops[mine[0]].tobytes()]
            best = min(tier(homes[name], target.host) for name in holders)
            pool = tuple(name for name in holders if tier(homes[name], target.host) == best)
            assert member in pool
            nbytes = int(pieces.sizes()[piece] * manifest.itemsizes[tensor])
            pools.setdefault(pool, dict.fromkeys(pool, 0))[member] += nbytes
            largest[pool] = max(largest.get(pool, 0), nbytes)
            total[member] += nbytes
    for pool, loads in pools.items():
        mean = sum(loads.values()) / len(pool)
        assert all(abs(load - mean) <= largest[pool] + 1e-6 for load in loads.values()), (pool, loads)
    assert sum(total.values()) == sum(plan.nbytes(rank.member) for rank in plan.targets)


@settings(max_examples=40)
@given(st.data())
def test_plans_are_deterministic_and_their_digests_tell_layouts_apart(data: st.DataObject) -> None:
    manifest, plan = drawn_plan(data)
    sources = data.draw(st.permutations(plan.sources))
    targets = data.draw(st.permutations(plan.targets))
    again = plan_transfer(manifest, sources, targets)
    assert again.digest == plan.digest
    for rank in plan.targets:
        assert again.pieces(rank.member).digest == plan.pieces(rank.member).digest
    other = data.draw(meshes(manifest)).layouts(manifest, "s")
    changed = plan_transfer(manifest, ranks_of(other, {name: HOSTS[0] for name in other}), targets)
    same = {rank.member: (rank.layout.digest, rank.host) for rank in plan.sources} == {
        name: (layout.digest, HOSTS[0]) for name, layout in other.items()
    }
    assert (changed.digest == plan.digest) == same


@settings(max_examples=60)
@given(st.data())
def test_covers_add_up_to_the_whole(data: st.DataObject) -> None:
    manifest = data.draw(manifests())
    tensors = contents(manifest, 7)
    full = whole(manifest)
    expected = np.zeros(len(manifest), np.uint64)
    expected[full.tensor] = digests_of(manifest, full, tensors)
    layouts = data.draw(meshes(manifest)).layouts(manifest, "r")
    made = coverage_of(manifest, layouts, "here")
    digests = {name: digests_of(manifest, layout, tensors) for name, layout in layouts.items()}
    made.check(digests, expected)


@settings(max_examples=60)
@given(st.data())
def test_a_row_removed_is_a_hole_unless_it_has_a_copy(data: st.DataObject) -> None:
    manifest = data.draw(manifests())
    layouts = data.draw(meshes(manifest)).layouts(manifest, "r")
    victims = [name for name, layout in layouts.items() if len(layout)]
    if not victims:
        return
    name = data.draw(st.sampled_from(victims))
    layout = layouts[name]
    gone = data.draw(st.integers(0, len(layout) - 1))
    rest = np.delete(np.arange(len(layout)), gone)
    layouts[name] = Layout(
        manifest,
        layout.tensor[rest],
        layout.starts[rest],
        layout.stops[rest],
        layout.region[rest],
        layout.offset[rest],
        layout.strides[rest],
        layout.regions,
    )
    copies = any(
        np.any(
            (other.tensor == layout.tensor[gone])
            & np.all(other.starts == layout.starts[gone], axis=1)
            & np.all(other.stops == layout.stops[gone], axis=1)
        )
        for other in layouts.values()
    )
    try:
        coverage_of(manifest, layouts, "here")
        assert copies
    except LayoutError as error:
        assert not copies
        assert manifest[int(layout.tensor[gone])].name in str(error)


@st.composite
def box_lists(draw: st.DrawFn) -> list[tuple[int, list[int], list[int]]]:
    dims = draw(st.integers(1, 3))
    count = draw(st.integers(0, 12))
    made = []
    for _ in range(count):
        starts = draw(st.lists(st.integers(0, 5), min_size=dims, max_size=dims))
        made.append((draw(st.integers(0, 2)), starts, [a + draw(st.integers(1, 4)) for a in starts]))
    return made


def columns(boxes: list[tuple[int, list[int], list[int]]]) -> tuple[Int64, Int64, Int64]:
    dims = len(boxes[0][1])
    return (
        np.array([group for group, _, _ in boxes], np.int64),
        np.array([starts for _, starts, _ in boxes], np.int64).reshape(-1, dims),
        np.array([stops for _, _, stops in boxes], np.int64).reshape(-1, dims),
    )


def meet(a: tuple[int, list[int], list[int]], b: tuple[int, list[int], list[int]]) -> bool:
    return a[0] == b[0] and all(max(s, t) < min(e, f) for s, e, t, f in zip(a[1], a[2], b[1], b[2], strict=True))


@settings(max_examples=200)
@given(box_lists(), st.data())
def test_the_index_finds_what_comparing_all_pairs_finds(boxes: list[tuple[int, list[int], list[int]]], data: st.DataObject) -> None:
    """Any boxes at all: overlapping, nested, equal."""
    if not boxes:
        return
    index = BoxIndex(*columns(boxes))
    distinct = [
        (int(group), starts.tolist(), stops.tolist())
        for group, starts, stops in zip(index.group, index.starts, index.stops, strict=True)
    ]
    assert distinct == sorted(distinct, key=lambda box: (box[0], [x for pair in zip(box[1], box[2], strict=True) for x in pair]))
    assert [distinct[box] for box in index.box.tolist()] == boxes
    queries = [box for box in data.draw(box_lists()) if len(box[1]) == len(boxes[0][1])]
    if queries:
        query, found = index.meeting(*columns(queries))
        expected = [(q, b) for q, one in enumerate(queries) for b, other in enumerate(distinct) if meet(one, other)]
        assert list(zip(query.tolist(), found.tolist(), strict=True)) == expected
    colliding = {one[0] for one, other in product(distinct, distinct) if one != other and meet(one, other)}
    reported = index.collisions()
    assert set(reported) == colliding
    for group, (one, other) in reported.items():
        assert one != other
        assert distinct[one][0] == group
        assert meet(distinct[one], distinct[other])


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=25, unique=True))
def test_a_hole_is_found_where_and_only_where_there_is_one(cells: list[tuple[int, int]]) -> None:
    starts = np.array(cells, np.int64).reshape(-1, 2)
    hole = first_hole(starts, starts + 1, (np.zeros(2, np.int64), np.full(2, 5, np.int64)))
    if len(cells) == 25:
        assert hole is None
        return
    assert hole is not None
    (r0, c0), (r1, c1) = hole
    assert r0 < r1
    assert c0 < c1
    assert not set(cells) & set(product(range(r0, r1), range(c0, c1)))
