"""Holds that the coordinator knows every span that ranks record: it leaves out what it does not know."""

from __future__ import annotations

import re
from pathlib import Path

import weightsync
from weightsync.spans import PHASES

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
