"""The check of SGLang's environment, and the plugin, where SGLang is not installed or lacks a part."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, entry_points
from types import ModuleType

import pytest

from weightsync import releases
from weightsync.engines.sglang import plugin
from weightsync.integrations import checks
from weightsync.integrations.__main__ import main


def test_an_environment_without_sglang_is_said_to_lack_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(releases, "version", absent)
    assert main(["sglang"]) == 1
    assert "missing  sglang       not installed in this environment" in capsys.readouterr().out


def test_another_release_is_limited_and_a_scheduler_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda name: "0.6.0")
    monkeypatch.setitem(sys.modules, "sglang", None)
    found = {finding.name: finding for finding in checks.findings("sglang")}
    assert found["sglang"].status == "limited"
    assert found["interface"].status == "missing"


def test_a_plugin_that_sglang_is_told_to_leave_out_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda name: "0.5.23")
    monkeypatch.setattr(checks, "entry_points", lambda group: entry_points(group="console_scripts", name="weightsync"))
    monkeypatch.setattr(releases, "missing_names", lambda package, purpose: [])
    monkeypatch.setenv("SGLANG_PLUGINS", "weightsync, other")
    assert {finding.name: finding.status for finding in checks.findings("sglang")}["plugin"] == "ok"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert {finding.name: finding.status for finding in checks.findings("sglang")}["plugin"] == "missing"
    monkeypatch.setattr(releases, "missing_names", lambda package, purpose: ["Scheduler.pause_generation"])
    assert {finding.name: finding.status for finding in checks.findings("sglang")}["interface"] == "missing"


def test_without_a_coordinator_in_the_environment_sglang_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_COORDINATOR", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import of it would fail
    plugin.register()


def test_an_sglang_without_the_required_parts_serves_without_updates_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = ModuleType("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry = hooks.HookType = None  # type: ignore[attr-defined]  # nothing is hooked
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), ModuleType("sglang.srt.plugins"), hooks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(releases, "version", lambda name: "0.5.9")
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", "http://head:7400")
    monkeypatch.setattr(releases, "missing_names", lambda package, purpose: ["Scheduler.ingest_requests"])
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "SGLang 0.5.9 cannot be used for updates by weightsync: it has no Scheduler.ingest_requests." in caplog.text
    assert "It gets no weights from http://head:7400" in caplog.text
