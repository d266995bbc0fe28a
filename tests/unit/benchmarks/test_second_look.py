"""The benchmark of the second look runs, on a few tensors."""

from __future__ import annotations

import pytest
from benchmarks import second_look


def test_it_prints_a_row_for_each_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(second_look, "SIZES", (7, 12))
    monkeypatch.setattr(second_look, "REPETITIONS", 3)
    second_look.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["7", "7", "12", "12"]
