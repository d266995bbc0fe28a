"""Holds the GRPO example as users run it: both modes end well within their staleness bound, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[3]
STEPS, GROUPS, SIZE = 4, 2, 4
SMALLEST = [*f"--steps {STEPS} --groups {GROUPS} --group-size {SIZE} --warm-up 5 --timeout 120 --json".split()]


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.grpo", *SMALLEST, *options]
    environment = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def check_nothing_is_left(directory: Path) -> None:
    """Its processes inherit its ``TMPDIR``, and are waited for before it ends."""
    mark, left = f"TMPDIR={directory}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                left.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    assert left == []
    # torch makes an empty folder for its compiler when Transformers is imported; everything else would be ours
    assert [path for path in directory.iterdir() if not path.name.startswith("torchinductor_")] == []


def outcome(directory: Path, *options: str, seconds: float = 140.0) -> dict[str, Any]:
    with start(directory, *options) as process:
        try:
            said, log = process.communicate(timeout=seconds)
        finally:
            process.kill()
    assert process.returncode == 0, log
    check_nothing_is_left(directory)
    found: dict[str, Any] = json.loads(said)
    print(found)
    return found


@pytest.mark.parametrize(
    ("mode", "bound", "more"),
    [
        pytest.param("one-step-off", 1, ["--replicas", "1"], marks=pytest.mark.rare),
        ("async", 2, ["--replicas", "1", "--staleness", "2"]),
        pytest.param("async", 3, ["--replicas", "2", "--trainer-ranks", "2"], marks=pytest.mark.rare),
        pytest.param("async", 0, ["--replicas", "2", "--staleness", "0"], marks=pytest.mark.rare),
    ],
)
def test_it_trains_within_the_bound(mode: str, bound: int, more: list[str], tmp_path: Path) -> None:
    found = outcome(tmp_path, "--mode", mode, *more)
    assert (found["ok"], found["mode"], found["engine"], found["error"]) == (True, mode, "demo", None)
    assert (found["steps"], found["versions"], found["samples"]) == (STEPS, STEPS + 1, STEPS * GROUPS * SIZE)
    assert found["staleness_bound"] == bound
    assert found["max_staleness"] == max(map(int, found["staleness"])) <= bound
    assert sum(found["staleness"].values()) == found["samples"] < found["tokens"]
    assert 0 < found["trainer_idle_fraction"] < 1


@pytest.mark.vllm
@pytest.mark.rare
@pytest.mark.timeout(620)
@pytest.mark.parametrize("mode", ["one-step-off", "async"])
def test_it_trains_on_real_vllm(mode: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as short:  # vLLM's sockets lie there, and their paths have a limit
        found = outcome(Path(short), "--engine", "vllm", "--replicas", "1", "--mode", mode, "--timeout", "580", seconds=600)
    assert (found["ok"], found["engine"], found["steps"], found["samples"]) == (True, "vllm", STEPS, STEPS * GROUPS * SIZE)
    left = {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_dist_"))}
    assert left <= shared


@pytest.mark.rare
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with start(tmp_path, "--steps", "1000") as process:
        assert process.stderr is not None
        try:
            assert any("every replica has joined" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, "everything was ended" in log) == (130, True), log
    check_nothing_is_left(tmp_path)
