"""The benchmark of joining from a store, in its smallest form: the replica has the weights, and the numbers are there."""

from __future__ import annotations

import json

import pytest
from benchmarks.store import main


def test_a_replica_joins_and_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--megabytes", "4", "--deltas", "2", "--repetitions", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objects"] == 3 and found["object_bytes"] > 4 << 20
    assert found["join_ratio"] > 0 and found["floor_seconds"] > 0
