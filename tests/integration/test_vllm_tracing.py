"""Holds that tracing vLLM's own loaders, on its own model classes, gives layouts that are bit for bit what those loaders do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "vllm_tracing.py"
CLASSES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rare)])
def test_traced_layouts_of_vllms_models_are_their_loaders(tmp_path: Path, ranks: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), str(rank), str(ranks)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, out in zip(processes, said, strict=True):
        assert process.returncode == 0, out[-3000:]
        seen = [json.loads(line.removeprefix("RESULT ")) for line in out.splitlines() if line.startswith("RESULT ")]
        assert [found["model"] for found in seen] == CLASSES
        for found in seen:
            assert found["reason"] is None, found
            assert found["different"] == [], found
        fused, split = seen[-1], seen[0]
        assert fused["tensors"] == fused["parameters"]  # the checkpoint holds query, key and value as one, as the engine does
        assert split["tensors"] > split["parameters"]
