"""A fixture that counts the groups which publishers of broadcasts make."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.transports.broadcast import sender

__all__ = ["groups"]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of readers of each group that a publisher of this process made, in order."""
    made: list[int] = []
    connect = sender._Group.__init__

    def counting(group: Any, *arguments: Any) -> None:
        connect(group, *arguments)
        made.append(len(group.members))

    monkeypatch.setattr(sender._Group, "__init__", counting)
    return made
