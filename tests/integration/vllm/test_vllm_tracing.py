"""Holds that tracing vLLM's own loaders, on its own model classes, gives layouts that are bit for bit what those loaders do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import none_outlives

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).parent / "vllm_tracing.py"
CLASSES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.rare),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.rare),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.rare),
        pytest.param({"data_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.rare),
    ],
    ids=json.dumps,
)
def test_traced_layouts_of_vllms_models_are_their_loaders(tmp_path: Path, parallel: dict[str, int]) -> None:
    """With several ranks, they are planned together, so that what no rank has is noticed."""
    environment, ranks = {**os.environ, "PYTHONPATH": str(ROOT)}, math.prod(parallel.values())  # True is one
    with none_outlives():
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(tmp_path), str(rank), str(ranks), json.dumps(parallel)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate(timeout=280)[0] for process in processes]
    for process, out in zip(processes, said, strict=True):
        assert process.returncode == 0, out[-3000:]
        seen = [json.loads(line.removeprefix("RESULT ")) for line in out.splitlines() if line.startswith("RESULT ")]
        experts = "enable_expert_parallel" in parallel
        assert [found["model"] for found in seen] == (["Qwen3MoeForCausalLM"] if experts else CLASSES)
        for found in seen:
            assert found["reason"] is None, found
            assert found["different"] == [], found
            assert (found["held"] < found["tensors"]) == (experts or "pipeline_parallel_size" in parallel)
            fused = found["model"] == "Phi3ForCausalLM"  # the checkpoint holds query, key and value as one, as the engine does
            assert (found["held"] == found["parameters"]) == fused
