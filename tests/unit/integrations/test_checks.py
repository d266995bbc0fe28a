"""The checks of environments where a framework is not installed, or is of another series."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from weightsync import releases
from weightsync.integrations import checks
from weightsync.integrations.__main__ import main


def test_every_framework_that_has_code_is_checked() -> None:
    assert list(checks.CHECKS) == ["areal", "nemo_rl", "openrlhf", "sglang", "skyrl", "trl", "verl"]


@pytest.mark.parametrize("name", ["areal", "openrlhf", "skyrl", "trl"])
def test_an_environment_without_the_framework_is_said_to_lack_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(releases, "version", absent)
    assert main([name]) == 1
    assert f"missing  {name:<13}not installed in this environment" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "row", "imported", "ours"),
    [
        ("areal", "engine", "areal", "weightsync.integrations.areal.actor"),
        ("openrlhf", "policy", "deepspeed", "weightsync.integrations.openrlhf.policy"),
        ("skyrl", "trainer", "vllm", "weightsync.integrations.skyrl"),
        ("trl", "server mode", "trl", "weightsync.integrations.trl.server_mode"),
    ],
)
def test_another_series_is_limited_and_what_cannot_be_imported_is_missing(
    name: str, row: str, imported: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "version", lambda package: "99.0.0")
    monkeypatch.setitem(sys.modules, imported, None)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    found = {finding.name: finding for finding in checks.findings(name)}
    assert found[name].status == "limited"
    interface = found[row]
    assert interface.status == "missing"
    assert imported in str(interface.value)
