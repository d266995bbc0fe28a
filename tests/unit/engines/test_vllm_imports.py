"""Holds that joining by the environment brings no numba into vLLM's processes, whose CPU build does not start with it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules", ["engines.vllm.patches, weightsync.engines.vllm.plugin", "engines.vllm.local_controls", "transports.net.messages"]
)
def test_what_is_imported_before_an_engine_is_there_brings_no_numba(modules: str) -> None:
    code = f"import sys, weightsync.{modules}; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
