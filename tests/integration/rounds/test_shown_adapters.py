"""What metrics and the command line show of adapters that a real fleet serves."""

from __future__ import annotations

import re

import pytest
from tests.integration.rounds.test_adapters import Made, made

from weightsync.cli.status import list_replicas
from weightsync.config import ClientSettings, Secret
from weightsync.server.metrics import CoordinatorMetrics

__all__ = ["made"]


def test_adapters_are_shown_by_name_and_version_until_they_are_retired(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = made(engines=2)
    settings = ClientSettings(coordinator=fleet.server.address, token=Secret(fleet.server.token))

    def metrics() -> list[str]:
        text = CoordinatorMetrics().text(fleet.server.coordinator.gauges()).decode()
        return re.findall(r"^weightsync_(adapter.*)$", text, re.MULTILINE)

    def printed() -> str:
        list_replicas(settings, as_json=False)
        return capsys.readouterr().out

    assert metrics() == ["adapters 0.0"]
    assert "adapters" not in printed()
    for number in (3, 4):
        assert fleet.adapters.publish("alice/math", number).ok
    alice = '{adapter="alice/math"}'
    assert metrics() == ["adapters 1.0", f"adapter_version{alice} 4.0", f"adapter_replicas{alice} 2.0"]
    assert re.search(r"^alice/math +4 at r0, r1 +3 at r0, r1 *$", printed(), re.MULTILINE)
    fleet.adapters.retire("alice/math", keep=0)
    assert metrics() == ["adapters 0.0"]
    assert "adapters" not in printed()
