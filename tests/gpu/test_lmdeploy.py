"""Holds that a real LMDeploy on a GPU takes updates from ``LMDeployClient`` over its own routes, and refuses what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import msgspec
import pytest
from tests.gpu.test_sglang_direct import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("lmdeploy") is None or find_spec("ray") is None, reason="needs LMDeploy with Ray"),
]


def test_updates_give_transformers_tokens() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_lmdeploy", "tiny"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    results = [line.removeprefix("RESULT ") for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, process.stdout[-4000:]
    seen = msgspec.json.decode(results[0])
    assert seen["wanted"]
    assert seen["before"] == seen["wanted"]
    assert "400" in seen["refused"]
    assert "model.elsewhere.weight" in seen["refused"]
    assert len(seen["updates"]) == 2, seen
    for update in seen["updates"]:
        assert update["wanted"]
        assert update["answers"] == update["wanted"], update
        assert update["buckets"] > 1
    assert seen["updates"][0]["answers"] != seen["updates"][1]["answers"]
