"""What a plan may cost: small layouts that meet in very many pieces are refused early; real ones are not; all can be stopped."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.unit.planning.simulation import ranks_of, targets_of

from weightsync.coordinator.negotiation import MemoryClaim
from weightsync.coordinator.planner import PlanMemory
from weightsync.errors import Aborted, ConfigurationError, LayoutError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import coverage_of
from weightsync.planning.limits import MOST_PIECES, Stop
from weightsync.planning.plan import plan_transfer
from weightsync_bench.shapes import qwen3_8b, qwen3_30b_a3b
from weightsync_bench.sharding import expert_parallel, fsdp, tensor_parallel


def strips(manifest: Manifest, count: int, dim: int) -> Layout:
    """The one tensor of ``manifest`` in strips of one element across ``dim``."""
    starts = np.zeros((count, 2), np.int64)
    stops = np.full((count, 2), count, np.int64)
    starts[:, dim] = np.arange(count)
    stops[:, dim] = np.arange(count) + 1
    zeros = np.zeros(count, np.int32)
    strides = np.tile(np.array([count, 1], np.int64), (count, 1))
    return Layout(manifest, zeros, starts, stops, zeros, np.zeros(count, np.int64), strides, (count * count,))


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """The most bytes that were allocated at a time."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [2000, 6000])
def test_rows_against_columns_are_refused_before_they_take_memory(count: int, peak: Callable[[], int]) -> None:
    manifest = Manifest([TensorSpec("w", (count, count), "int8")])
    sources = ranks_of({"trainer/0": strips(manifest, count, 0)})
    targets = targets_of({"r/0": strips(manifest, count, 1)})
    with pytest.raises(LayoutError, match=r"r/0 alone has more than [\d,]+ pieces.*trainer/0"):
        plan_transfer(manifest, sources, targets)
    assert peak() < 256 << 20  # a step of the search; 6.5 GB and more before there was a bound


def test_many_ranks_are_counted_together(peak: Callable[[], int]) -> None:
    count = 512
    manifest = Manifest([TensorSpec("w", (count, count), "int8")])
    sources = ranks_of({"trainer/0": strips(manifest, count, 0)})
    targets = targets_of({f"r/{rank}": strips(manifest, count, 1) for rank in range(64)})
    with pytest.raises(LayoutError, match="64 engine ranks"):
        plan_transfer(manifest, sources, targets)
    assert peak() < 256 << 20


@pytest.mark.parametrize(
    ("specs", "sources", "parallel", "targets"),
    [
        (qwen3_30b_a3b, 8, tensor_parallel, 8),
        (qwen3_30b_a3b, 64, expert_parallel, 64),
        (qwen3_8b, 1024, tensor_parallel, 64),
    ],
)
def test_real_plans_are_not_refused(
    specs: Callable[[], list[TensorSpec]], sources: int, parallel: Callable[[Manifest, int], list[Layout]], targets: int
) -> None:
    manifest = Manifest(specs())
    held = ranks_of({f"s{i:04}": one for i, one in enumerate(fsdp(manifest, sources))})
    plan = plan_transfer(manifest, held, targets_of({f"t{i:02}": one for i, one in enumerate(parallel(manifest, targets))}))
    assert sources < plan.count <= MOST_PIECES
    assert plan.count == sum(plan.pieces(f"t{i:02}").source.size for i in range(targets)) or plan.count > 10**7


def test_whole_tensors_from_very_many_ranks_are_not_refused() -> None:
    manifest = Manifest(qwen3_8b())
    held = ranks_of({f"s{i:04}": one for i, one in enumerate(fsdp(manifest, 512))})
    staging = staging_layout(manifest, 256 << 20)
    assert plan_transfer(manifest, held, targets_of({f"t{i:02}": staging for i in range(64)})).count > 10**6


def test_a_search_ends_when_nobody_waits_for_it() -> None:
    manifest = Manifest(qwen3_8b())
    stop = Stop()
    sources = {f"s{i}": one for i, one in enumerate(fsdp(manifest, 8))}
    targets = targets_of({f"t{i}": one for i, one in enumerate(tensor_parallel(manifest, 8))})
    plan = plan_transfer(manifest, ranks_of(sources), targets, stop=stop)
    with pytest.raises(Aborted):  # in the middle: after the first pieces were counted
        plan_transfer(manifest, ranks_of(sources), targets, lambda pieces: stop.set(), stop)
        plan.pieces("t0")
    for work in (
        lambda: plan.pieces("t0"),
        lambda: coverage_of(manifest, sources, "the trainer", stop),
        lambda: plan_transfer(manifest, ranks_of(sources), targets, stop=stop),
    ):
        with pytest.raises(Aborted, match="its round ended"):
            work()


def test_plans_share_the_coordinators_memory() -> None:
    room = PlanMemory(1000)
    one, other = MemoryClaim(room.take, room.give), MemoryClaim(room.take, room.give)
    one.take(900)
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_PLAN_BYTES"):
        other.take(200)
    one.keep(300)
    other.take(200)
    assert room.taken == 500
    del one
    assert room.taken == 200


def test_a_plan_takes_no_more_than_is_claimed(peak: Callable[[], int]) -> None:
    """The claim of a plan, three times what is kept of it, is what making it takes."""
    manifest = Manifest([TensorSpec("w", (300, 300), "int8")])  # one geometry: nothing is shared between tensors
    claimed: list[int] = []
    sources = ranks_of({"s": strips(manifest, 300, 0)})
    targets = targets_of({f"t{i}": strips(manifest, 300, 1) for i in range(4)})
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    plan = plan_transfer(manifest, sources, targets, claimed.append)
    kept = [plan.pieces(rank.member).to_columns() for rank in targets]
    assert sum(claimed) == plan.count == sum(columns.rows for columns in kept)
    piece = 20 + 24 * manifest.dims
    print(f"{plan.count:,} pieces; peak {(peak() - before) / plan.count:.0f} bytes each, {piece} kept")
    assert peak() - before < 3 * piece * plan.count
