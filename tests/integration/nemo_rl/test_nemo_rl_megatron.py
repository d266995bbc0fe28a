"""NeMo-RL's Megatron policy: its ranks publish shards, which are what the export that NeMo-RL sends yields."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.megatron.test_megatron import NEEDED

pytestmark = [
    pytest.mark.rare,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}: make"),
]


def test_the_shards_of_each_rank_are_what_the_export_yields() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.nemo_rl.nemo_rl_megatron"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [{"sent": 47, "wrong": [], "names": True}] * 2
