"""The check of AReaL's environment where AReaL is not installed, or is of another series."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from weightsync.integrations.__main__ import main
from weightsync.integrations.areal import check


def test_an_environment_without_areal_is_said_to_lack_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(check, "version", absent)
    assert main(["areal"]) == 1
    assert "missing  areal        not installed in this environment" in capsys.readouterr().out


def test_another_series_is_limited_and_an_engine_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "version", lambda name: "2.0.0")
    monkeypatch.setitem(sys.modules, "areal", None)
    monkeypatch.delitem(sys.modules, "weightsync.integrations.areal.actor", raising=False)
    found = {finding.name: finding for finding in check.findings()}
    assert found["areal"].status == "limited"
    assert found["engine"].status == "missing"
    assert "areal" in str(found["engine"].value)
