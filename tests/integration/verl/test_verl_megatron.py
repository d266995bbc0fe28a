"""verl's Megatron engine: its ranks publish shards, which are what its own gather sends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240)]


def test_the_shards_of_each_rank_are_what_verl_gathers_and_sends() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.verl.verl_megatron"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert [rank["wrong"] for rank in ranks] == [[], []]
    assert {rank["sent"] for rank in ranks} == {47}
    assert all(rank["streams"] == {"quantized": True, "adapted": True} for rank in ranks)
