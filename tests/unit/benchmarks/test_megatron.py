"""Layouts of Megatron ranks that benchmarks make from a configuration, and what planning for DeepSeek-V3 takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.megatron_layouts import MegatronLayouts, qwen3_30b_a3b_config, stages
from tests.unit.planning.simulation import source_bytes

from weightsync.errors import LayoutError
from weightsync.model import Manifest
from weightsync.planning.coverage import coverage_of
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync_bench.shapes import qwen3_30b_a3b
from weightsync_bench.sharding import tensor_parallel

ROOT = Path(__file__).parents[3]


def test_its_tensors_are_those_of_the_model() -> None:
    specs = [spec for spec in qwen3_30b_a3b() if ".layers." not in spec.name or ".layers.0." in spec.name]
    assert MegatronLayouts(qwen3_30b_a3b_config(1)).manifest == Manifest(specs)


def test_the_ranks_of_a_mesh_hold_each_element_once() -> None:
    """TP 2, EP 2, ETP 1, PP 2."""
    model = MegatronLayouts(qwen3_30b_a3b_config(3, 4))
    first, second = stages((1, 2))
    layouts = {
        f"{stage}/{rank}": model.layout(layers, range(2 * rank, 2 * rank + 2), tp=(rank, 2), first=stage == 0, last=stage == 1)
        for stage, layers in enumerate((first, second))
        for rank in range(2)
    }
    coverage_of(model.manifest, layouts, "the trainer")
    assert sum(layout.nbytes(model.manifest) for layout in layouts.values()) > model.manifest.nbytes  # norms and routers are copies
    layouts["1/1"] = model.layout(second, range(1, 3), tp=(1, 2), first=False, last=True)
    with pytest.raises(LayoutError, match=r"layers\.[12]\.mlp\.experts\.3\."):
        coverage_of(model.manifest, layouts, "the trainer")


def test_ranks_with_equal_parameters_share_the_reads_and_a_host_reads_its_own() -> None:
    """EP 2 over four data-parallel ranks on two hosts: attention is on all four, each half of the experts on two."""
    model, hosts = MegatronLayouts(qwen3_30b_a3b_config(1, 8)), [Host("a", "a"), Host("b", "b")]
    halves = [model.layout(range(1), range(4 * rank, 4 * rank + 4), first=True, last=True) for rank in range(2)]
    sources = [SourceRank(f"trainer/{rank}", hosts[rank // 2], halves[rank % 2]) for rank in range(4)]
    engines = tensor_parallel(model.manifest, 2)
    near = [TargetRank(f"near/{rank}", hosts[rank], layout) for rank, layout in enumerate(engines)]
    plan = plan_transfer(model.manifest, sources, near)
    assert set(plan.pieces("near/0").sources) == {"trainer/0", "trainer/1"}
    assert set(plan.pieces("near/1").sources) == {"trainer/2", "trainer/3"}
    far = [TargetRank(f"far/{rank}", Host("c", "c"), layout) for rank, layout in enumerate(engines)]
    amounts = source_bytes(plan_transfer(model.manifest, sources, far))
    assert max(amounts.values()) < 1.5 * min(amounts.values())


@pytest.mark.rare
@pytest.mark.timeout(180)
def test_deepseek_v3_on_1024_ranks_is_planned_in_time_and_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.megatron_planning", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=True)
    figures = json.loads(done.stdout)
    assert figures["tensors"] > 45_000
    assert figures["seconds"] < 20
    assert figures["peak_bytes"] < 4e9
    assert figures["sources_read"] > 512  # copies share the reads
