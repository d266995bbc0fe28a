"""Holds that joining by the environment brings no numba into vLLM's processes, whose CPU build does not start with it."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_imported_before_an_engine_is_there_brings_no_numba() -> None:
    code = "import sys, weightsync.engines.vllm.patches, weightsync.engines.vllm.plugin; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
