"""Holds that adapters of all experts reach a real vLLM on a GPU, whose CUDA graphs stay, and are read back from its layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM for GPUs"),
]


def test_answers_are_those_of_adapters_that_vllm_loaded() -> None:
    command = [sys.executable, "-m", "benchmarks.vllm_adapters", "moe", "--rank", "8", "--versions", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment, check=False)
    results = [line.removeprefix("RESULT ") for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, process.stderr[-4000:]
    seen = json.loads(results[0])
    assert seen["tensors"] == 2 * 3 * (4 + 3 * 8)  # A and B of three layers: attention, and gate, up and down of eight experts
    assert (seen["verified"], seen["paused_seconds"]) == ("installed", 0.0)
    for published, loaded_twice in zip(seen["answers_as_loaded"], seen["loaded_twice_answers_alike"], strict=True):
        assert published or not loaded_twice
    assert any(seen["loaded_twice_answers_alike"])
    assert all(seen["answers_differ_from_base"])
    assert "Graph capturing finished" in process.stderr
