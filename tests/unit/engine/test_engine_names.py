"""Names that Engine had before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import weightsync


def test_settle_is_drain_with_a_warning() -> None:
    waited: list[float] = []
    engine = object.__new__(weightsync.Engine)
    vars(engine)["_link"] = SimpleNamespace(drain=waited.append)
    with pytest.deprecated_call(match=r"Engine\.drain"):
        engine.settle(3.0)
    assert waited == [3.0]
