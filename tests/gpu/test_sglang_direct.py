"""Holds that a real SGLang on a GPU, joined by its plugin, is written directly, with its graphs valid, and takes streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("sglang") is None or find_spec("sgl_kernel") is None, reason="needs SGLang for GPUs"),
]


def outcome(module: str, *arguments: str) -> dict[str, Any]:
    """What the updates of a tiny model did: as ``check_updates`` wants it, but for the delivery."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=360, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    results = [line.removeprefix("RESULT ") for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, process.stdout[-4000:]
    seen: dict[str, Any] = json.loads(results[0])
    return seen


def check_updates(seen: dict[str, Any], delivery: str, transport: str, *, exact: bool = True) -> None:
    """Three updates, the third with the weights of the second. ``exact``: SGLang's tokens are Transformers'."""
    assert not exact or seen["before"] == seen["wanted"]  # they agree at all, also after the trial
    assert len(seen["updates"]) == 3, seen
    for update in seen["updates"]:
        verified = "installed" if delivery == "direct" else "received"
        assert (update["delivery"], update["transports"], update["verified"]) == (delivery, [transport], verified), update
        assert [label.rpartition("@")[2] for label in update["labels"]] == [str(update["published"])], update
        assert not exact or update["answers"] == update["wanted"], update
        assert update["warm"] > 0  # so a cache that survived would have been used
        assert update["cached"] == 0
        assert all(len(set(answer)) > 3 for answer in update["answers"])
    first, second, third = (update["answers"] for update in seen["updates"])
    assert first != second
    assert second == third
    assert seen["bits_of_own_loading"] is True


@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_updates_give_transformers_tokens_with_graphs_captured_before(model: str) -> None:
    # two experts may be as close as a sum in another order: then other tokens follow
    check_updates(outcome("benchmarks.gpu_sglang", model), "direct", "cuda_ipc", exact=model == "tiny")


def test_a_stream_gives_the_same() -> None:
    check_updates(outcome("benchmarks.gpu_sglang", "tiny", "--delivery", "streamed"), "streamed", "cuda_ipc")


@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_fp8_blocks_are_those_of_a_checkpoint_quantized_offline(model: str) -> None:
    seen = outcome("benchmarks.gpu_sglang", model, "--format", "fp8-block")
    check_updates(seen, "direct", "cuda_ipc", exact=False)
    assert seen["as_quantized_offline"] is True


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_two_tensor_parallel_ranks_give_the_same() -> None:
    check_updates(outcome("benchmarks.gpu_sglang", "tiny", "--ranks", "2"), "direct", "cuda_ipc")
