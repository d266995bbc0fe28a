"""Real rounds into a real vLLM: offline and served, one rank and two, tied and untied, old prefixes cached, a load that fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("vllm_rounds.py")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("offline-env", 2),
        ("server-env", 1),
        *(pytest.param(kind, ranks, marks=pytest.mark.rare) for kind, ranks in [
            ("offline", 1), ("offline", 2), ("server", 1), ("server", 2), ("offline-env", 1), ("async-env", 1), ("async-env", 2),
            ("server-env", 2),
        ]),
    ],
)  # fmt: skip
def test_answers_are_those_of_the_published_checkpoint(tmp_path: Path, kind: str, ranks: int) -> None:
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks > 1 else "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(PROGRAM.parent),
    }  # fmt: skip
    for name in [name for name in environment if name.startswith(("WEIGHTSYNC_", "COVERAGE_"))]:
        del environment[name]
    command = [sys.executable, str(PROGRAM), kind, str(ranks), str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever vLLM left
    results = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    assert process.returncode == 0, "\n".join(line for line in out.splitlines() if "Error" in line)[-4000:]
    seen = json.loads(results[0])
    assert seen["before"] is True  # vLLM and Transformers agree at all
    for entry in seen["versions"]:
        assert entry["equal"], entry
        assert entry["label_after"] == entry["version"]
        assert (entry["state"], entry["delivery"], entry["verified"], entry["digest"]) == ("loaded", "streamed", "received", True)
        assert entry["nbytes"] == ranks * entry["model"]  # every rank stages the whole checkpoint
        assert entry["cached_before"] > 0  # so a cache that survived would have been used
        assert entry["cached_after"] == 0
        assert all(len(set(answer)) > 3 for answer in entry["answers"])
    answers = [entry["answers"] for entry in seen["versions"]]
    assert all(one != other for index, one in enumerate(answers) for other in answers[:index])
    failed = seen["versions"][2]
    assert "injected into the load" in failed["failed"]
    assert failed["label"] in (None, "weightsync:none")  # never the old version's, nor the one that failed
