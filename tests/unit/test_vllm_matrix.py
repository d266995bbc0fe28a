"""Holds the table of vLLM's releases to the tests that fill it."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from tools import vllm_matrix

from weightsync.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_says_what_each_test_came_to() -> None:
    outcomes = {"server-env-1": "passed", "offline-env-2": "failure"}
    line = vllm_matrix.row("0.99.0", outcomes, datetime.date(2030, 1, 2))
    assert line == "| 0.99.0 | passed | failure | not run | not run | 2030-01-02 |"


def test_an_unknown_release_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_matrix.main(["0.1.0"]) == 2
    assert "0.27.1" in capsys.readouterr().err


def test_the_guide_has_a_row_for_each_release_and_names_as_tested_what_passed() -> None:
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \|(.*)\| (?:\d{4}-\d\d-\d\d|-) \|$", guide, re.MULTILINE)
    assert [release for release, _ in rows] == [release.rpartition(".")[0] for release in vllm_matrix.RELEASES]
    passed = {release for release, outcomes in rows if "passed" in outcomes}
    assert passed == set(RELEASES["vllm"].tested) - {"0.25"}  # tested on GPUs
