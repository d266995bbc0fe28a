"""The benchmark of the second look runs, on a few tensors."""

from __future__ import annotations

import pytest
from benchmarks import second_look


def test_it_prints_a_row_for_each_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(second_look, "SIZES", (7, 12))
    monkeypatch.setattr(second_look, "REPETITIONS", 3)
    monkeypatch.setattr(second_look, "LAYERS", 2)
    monkeypatch.setattr(second_look, "EXPERTS", 4)
    second_look.main()
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    tensors = str(2 * (3 * 4 + 9) + 3)  # of each layer: experts, attention, norms and a router; embedding, norm and head
    assert rows == ["7", "7", "12", "12", tensors, tensors]
