"""Planning real shapes within the memory asked for and twice the time.

Time is the processor's: planning runs on one core, and what else the machine does must not fail a test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.planning.simulation import ranks_of, source_bytes, targets_of

from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.coverage import coverage_of
from weightsync.planning.plan import plan_transfer
from weightsync.planning.split import split_rows
from weightsync_bench.shapes import one_trillion, qwen3_8b, qwen3_30b_a3b
from weightsync_bench.sharding import expert_parallel, fsdp, tensor_parallel

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("specs", "tensors", "gigabytes"), [(qwen3_8b, 399, 16.38), (qwen3_30b_a3b, 18_867, 61.06), (one_trillion, 69_915, 2052.8)]
)
def test_shapes_are_the_models(specs: Callable[[], list[TensorSpec]], tensors: int, gigabytes: float) -> None:
    manifest = Manifest(specs())
    assert len(manifest) == tensors
    assert manifest.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("parallel", [tensor_parallel, expert_parallel])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_mixture_of_experts_from_8_to_8(parallel: Callable[[Manifest, int], list[Layout]], copies: int) -> None:
    manifest = Manifest(qwen3_30b_a3b())
    sources = {f"s{i}": one for i, one in enumerate(fsdp(manifest, 8 // copies) * copies)}
    targets = {f"t{i}": split_rows(manifest, one, 1 << 20) for i, one in enumerate(parallel(manifest, 8))}
    begin, computing = time.perf_counter(), time.process_time()
    plan = plan_transfer(manifest, ranks_of(sources), targets_of(targets))
    pieces = {name: plan.pieces(name) for name in targets}
    seconds, cpu = time.perf_counter() - begin, time.process_time() - computing
    covered = time.perf_counter()
    coverage_of(manifest, sources, "the trainer")
    covered = time.perf_counter() - covered
    count = sum(map(len, pieces.values()))
    took = f"{seconds:.3f} s, {cpu:.3f} s of one core (goal 0.5)"
    print(f"{parallel.__name__}, {copies} copies: {count:,} pieces in {took}; cover {covered:.3f} s")
    load = source_bytes(plan)
    assert sum(load.values()) == sum(layout.nbytes(manifest) for layout in targets.values())
    assert max(load.values()) - min(load.values()) <= 0.01 * max(load.values())
    assert cpu <= 2 * 0.5


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(240)
def test_a_trillion_parameters_from_256_to_16() -> None:
    command = [sys.executable, "-m", "tests.unit.planning.trillion"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(f"1T (goals: 20 s and 4 GB): {report}")
    assert report["nbytes"] is True
    assert report["pieces"] > 20_000_000
    assert report["cpu_seconds"] <= 2 * 20
    assert report["peak_bytes"] <= 4e9
