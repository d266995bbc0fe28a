"""Holds that weights quantized by the trainer reach vLLM's own FP8 layers directly, bit for bit, or are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes import none_outlives

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def outcome(folder: Path, case: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.integration.vllm.vllm_quantized", str(folder), case]
    with none_outlives():
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, cwd=ROOT, env=environment
        )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stdout[-3000:]]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize(
    ("case", "processed"),
    [
        pytest.param("dense", 0, marks=pytest.mark.rare),
        ("experts", 0),
        pytest.param("e8m0-experts", 6, marks=pytest.mark.rare),
        pytest.param("changed", 8, marks=pytest.mark.rare),
        pytest.param("deep", 8, marks=pytest.mark.rare),
        pytest.param("deep-experts", 6, marks=pytest.mark.rare),
        pytest.param("deep-e8m0", 8, marks=pytest.mark.rare),
        pytest.param("deep-packed", 8, marks=pytest.mark.rare),
        ("deep-packed-e8m0-experts", 6),
        pytest.param("fp8-channel", 8, marks=pytest.mark.rare),
        pytest.param("fp8-tensor", 8, marks=pytest.mark.rare),
    ],
)
def test_blocks_and_scales_are_installed_as_by_vllms_own_loading(tmp_path: Path, case: str, processed: int) -> None:
    """``deep``: by DeepGEMM's kernels for Hopper; ``packed``: for Blackwell. ``processed`` layers are processed after the move."""
    found = outcome(tmp_path, case)
    assert found.pop("processed") == processed
    assert found.pop("separate") == (12 if case == "fp8-tensor" else 0)  # bytes: of the scales of q, k and v, which vLLM makes one
    assert found == {"reason": None, "kept": True, "manifest": True, "same": True, "moved": [], "fp8": 8}


def test_a_layout_step_requantizes_only_blocks_that_this_changes_with_the_bits_of_vllm(tmp_path: Path) -> None:
    assert outcome(tmp_path, "requantized") == {"rows": [768, 384, 768, 256, 128, 256, 200, 200, 200, 192, 192, 192]}


@pytest.mark.rare
def test_a_kernel_that_does_something_else_each_time_is_refused_by_name(tmp_path: Path) -> None:
    found = outcome(tmp_path, "unsteady")
    assert found["reason"].startswith("processing model.layers.0.mlp.down_proj.weight_scale_inv, ")
    assert found["kept"]


@pytest.mark.rare
def test_experts_whose_kernel_computes_with_a_copy_of_scales_are_refused_by_name(tmp_path: Path) -> None:
    assert "the kernel of model.layers.0.mlp.experts" in outcome(tmp_path, "copies")["reason"]


@pytest.mark.rare
def test_a_configuration_that_contradicts_the_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    found = outcome(tmp_path, "contradicts")
    assert "mlp.gate.weight (it is converted from torch.bfloat16 to torch.float8_e4m3fn" in found["reason"]
    assert found["kept"]
