"""Holds that the coordinator knows every span that ranks record: it leaves out what it does not know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import weightsync
from weightsync.spans import PHASES, SpanRecorder, recording, span

PACKAGE = Path(weightsync.__file__).parent
OF_RANKS = ("engine", "engines", "publishing", "tensors", "trainer", "transports")


def test_spans_of_ranks_are_known() -> None:
    recorded = {
        name
        for folder in OF_RANKS
        for file in (PACKAGE / folder).rglob("*.py")
        for call in re.findall(r"\bspan\(([^)]*)", file.read_text())
        for name in re.findall(r'"(\w+)"', call)
    }
    assert {"copy", "digest", "changes", "apply", "read"} <= recorded
    assert recorded <= set(PHASES)


def test_spans_are_ranges_of_nvidias_profilers_where_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    with span("read"):
        """Nobody asked for it."""
    with recording(SpanRecorder()), span("read"), pytest.raises(ValueError), span("digest"):
        raise ValueError
    assert ranges == ["weightsync.read", "weightsync.digest", "end", "end"]
