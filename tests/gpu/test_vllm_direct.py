"""Holds that a real vLLM on a GPU, joined by its plugin, is written directly, with its graphs valid and its loader never called."""

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
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM for GPUs"),
]


def _updated(ranks: int, transport: str, model: str = "tiny", *options: str) -> dict[str, Any]:
    """What three updates of a tiny model did, the third with the weights of the second."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_vllm", model, "--ranks", str(ranks), "--transport", transport, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    results = [line.removeprefix("RESULT ") for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert process.returncode == 0, process.stdout[-4000:]
    assert results, process.stdout[-4000:]
    seen: dict[str, Any] = json.loads(results[0])
    if not options:
        assert seen["before"] == seen["wanted"]  # vLLM and Transformers agree at all, also after the trial
    assert len(seen["updates"]) == 3, seen
    for update in seen["updates"]:
        assert (update["delivery"], update["transports"], update["verified"]) == ("direct", [transport], "installed"), update
        assert str(update["published"]) in update["version"]
        if model == "tiny":  # two experts may be as close as a sum in another order: then other tokens follow
            assert update["answers"] == update["wanted"], update
        assert update["in_place"]
        assert update["warm"] > 0  # so a cache that survived would have been used
        assert update["cached"] == 0
        assert all(len(set(answer)) > 3 for answer in update["answers"])
    first, second, _ = (update["answers"] for update in seen["updates"])
    assert first != second
    assert seen["loader_calls"] == []
    return seen


@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_updates_give_transformers_tokens_with_graphs_captured_before(model: str) -> None:
    assert _updated(1, "cuda_ipc", model)["bits_of_own_loading"] is True


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_two_tensor_parallel_ranks_give_the_same(transport: str) -> None:
    _updated(2, transport)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("how", ["now", "background"])
def test_experts_that_move_between_two_ranks_hold_what_was_published(how: str) -> None:
    seen = _updated(2, "cuda_ipc", "moe", "--balance", how)
    assert [update["wrong"] for update in seen["updates"]] == [[], [], []]
    assert len({tuple(update["experts"]) for update in seen["updates"]}) > 1, seen  # or nothing moved
