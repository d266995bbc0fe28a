"""Holds the first program of README to ``examples/minimal.py``. ``tests/integration/packaging/test_wheel.py`` runs it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (ROOT / "examples" / "minimal.py").read_text()


def test_it_is_what_readme_shows_first() -> None:
    first = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert first is not None
    assert first[1] == PROGRAM


def test_it_is_read_in_a_minute() -> None:
    assert len(PROGRAM.splitlines()) <= 40
