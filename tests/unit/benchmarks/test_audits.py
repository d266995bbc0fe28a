"""A tiny run of the benchmark of audits."""

from __future__ import annotations

import json

import pytest
from benchmarks.audits import main

from weightsync.coordinator.audits import Audits


def test_a_tiny_run_alternates_and_counts_looks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Audits, "least_seconds", 0.0)
    main(["--mebibytes", "4", "--share", "1", "--seconds", "0.5", "--turns", "1", "--least", "0.02"])
    row = json.loads(capsys.readouterr().out)
    assert row["looks"] > 1 and row["look_ms"] > 0 and row["reading_ms"] > 0
    assert row["steps_per_second_with"] > 0 and row["lowest"] == row["ratio"] == row["highest"]
