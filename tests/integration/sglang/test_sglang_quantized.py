"""Holds that weights quantized by the trainer reach SGLang's own FP8 layers directly, bit for bit, or are refused by name.

Needs the environment of ``make sglang-test``. Nothing is computed with the models: ``sglang_quantized.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sglang.sglang_quantized import make_checkpoints
from tests.integration.sglang.sglang_scheduler import WITHOUT_SGLANG, install_stubs, use_environment
from tests.processes import none_outlives, ranks

from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WITHOUT_SGLANG, reason="SGLang is not installed here: make sglang-test"),
]  # fmt: skip


def outcome(folder: Path, case: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.integration.sglang.sglang_quantized", str(folder), case]
    with none_outlives():
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, cwd=ROOT, env=environment
        )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done.stdout[-3000:]]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.mark.parametrize(
    ("case", "verified", "packed"),
    [
        ("dense", "installed", 0),
        ("experts", "installed", 0),
        ("e8m0-experts", "received", 0),
        pytest.param("changed", "received", 0, marks=pytest.mark.rare),
        pytest.param("deep", "received", 8, marks=pytest.mark.rare),
        pytest.param("deep-e8m0", "received", 8, marks=pytest.mark.rare),
        ("deep-experts", "received", 8),
        pytest.param("fp8-block-compressed-experts", "received", 0, marks=pytest.mark.rare),
        pytest.param("fp8-channel-experts", "received", 0, marks=pytest.mark.rare),
        pytest.param("fp8-tensor", "received", 0, marks=pytest.mark.rare),
    ],
)
def test_three_updates_give_the_bits_of_sglangs_own_loading(tmp_path: Path, case: str, verified: str, packed: int) -> None:
    """``deep``: with DeepGEMM's kernels for Blackwell, which pack 8 scales. ``changed``: with one that doubles them."""
    result = outcome(tmp_path, case)
    assert result["updates"] == [["loaded", "direct", verified, []]] * 3  # no parameter differs
    assert (result["moved"], result["torch.float8_e4m3fn"], result["torch.int32"]) == ([], 8, packed)
    # A scale that was changed on the way is named, and the next update is loaded again.
    assert result["fault"] == (None if "e8m0" in case or case.startswith("fp8") else [True, "loaded"])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unsteady", "processing model.layers.0.mlp.down_proj.weight_scale_inv, "),
        pytest.param("derived", "SGLang computes model.layers.0.mlp.down_proj.largest_scale from", marks=pytest.mark.rare),
        pytest.param("cache", "SGLang keeps model.layers.0.self_attn.k_proj.k_scale, ", marks=pytest.mark.rare),
        pytest.param("stream", "asks for direct delivery, and a stream goes through loaders", marks=pytest.mark.rare),
        pytest.param("streamed", "WEIGHTSYNC_DELIVERY is streamed", marks=pytest.mark.rare),
    ],
)
def test_what_cannot_be_right_is_refused_by_name_and_the_model_keeps_its_weights(tmp_path: Path, case: str, reason: str) -> None:
    """``unsteady``: a kernel that does something else each time. ``derived``: one that keeps something else than parameters."""
    result = outcome(tmp_path, case)
    assert reason in result["reason"]
    assert result["changed"] == []


@pytest.mark.parametrize(
    ("case", "verified"),
    [("two-deep-experts", "received"), pytest.param("two-dense", "installed", marks=pytest.mark.rare)],
)
def test_two_ranks_have_the_bits_of_sglangs_own_loading(tmp_path: Path, case: str, verified: str) -> None:
    install_stubs()
    use_environment()
    from sglang.srt.server_args import PortArgs, ServerArgs

    make_checkpoints(tmp_path, case)  # type: ignore[no-untyped-call]
    arguments = ServerArgs(model_path=str(tmp_path / "served"), device="cpu", tp_size=2)
    arguments.resolve_once()
    sockets = json.dumps(dataclasses.asdict(PortArgs.init_new(arguments)))
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        environment = {
            "WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token,
            "SGLANG_CPU_OMP_THREADS_BIND": f"0|{min(1, (os.cpu_count() or 1) - 1)}",
        }  # fmt: skip
        program = ("tests.integration.sglang.sglang_quantized_rank", tmp_path, case, sockets)
        with ranks(2, *program, environment=environment) as processes:
            outputs = [process.output(280) for process in processes]
    results = [json.loads(output.rpartition("RESULT ")[2].splitlines()[0]) for output in outputs]
    assert results == [[[["loaded", "direct", verified]] * 3, []], [[], []]]
