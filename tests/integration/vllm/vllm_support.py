"""Runs a program of these tests with a real vLLM, in a session of its own, and reads the result that it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes import none_outlives

HERE = Path(__file__).resolve().parent
SECONDS = 400


def run_program(
    name: str, *arguments: object, ranks: int, more: Mapping[str, str] | None = None, launcher: Sequence[str] = ()
) -> dict[str, Any]:
    """Run ``name``, a path below ``tests/integration``. Return what it saw, and what was logged as ``log``.

    Fails with the errors printed. What vLLM left behind is killed. ``more`` is added to its environment, and ``launcher`` are
    Python's arguments before it.
    """
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks > 1 else "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    for key in [key for key in environment if key.startswith(("WEIGHTSYNC_", "COVERAGE_"))]:
        del environment[key]
    environment |= more or {}
    command = [sys.executable, *launcher, str(HERE.parent / name), *map(str, arguments)]
    with none_outlives():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )
        out, _ = process.communicate(timeout=SECONDS)
    errors = "\n".join(line for line in out.splitlines() if re.search("Error|Exceeded|Failed|Lost|Aborted", line))[-4000:]
    assert process.returncode == 0, f"ended with {process.returncode}: {errors or out[-4000:]}"
    _, there, rest = out.rpartition("RESULT {")  # perhaps behind a line that another process of vLLM left unfinished
    assert there, out[-4000:]
    result: dict[str, Any] = json.loads("{" + rest.splitlines()[0])
    return result | {"log": out}
