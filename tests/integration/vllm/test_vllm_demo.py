"""The demo with real vLLM replicas on this CPU: every token is the labelled version's, and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import none_outlives

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(620)
@pytest.mark.parametrize("more", [["--replicas", "2"], ["--replicas", "1", "--engine-tp", "2"]], ids=["two replicas", "two ranks"])
def test_the_demo_with_vllm_is_right(tmp_path: Path, more: list[str]) -> None:
    shared = {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_dist_"))}
    command = [
        sys.executable,
        "-m",
        "examples.demo",
        "--engine",
        "vllm",
        "--trainer-ranks",
        "1",
        "--versions",
        "3",
        "--steps",
        "3",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with none_outlives():
        done = subprocess.run([*command, "--json", *more], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert (found["engine"], found["delivery"], found["versions"]) == ("vllm", "streamed", 3)
    assert found["tokens_match"] is True
    assert (found["torn_responses"], found["mislabelled_responses"]) == (0, 0)
    assert found["responses_checked"] > 9 * int(more[1])  # more than the probes alone
    assert all(replica["digest"] == found["trainer_digest"] for replica in found["replicas"])
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_dist_"))} <= shared
