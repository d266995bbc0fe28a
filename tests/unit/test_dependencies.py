"""What we depend on is pinned exactly and has a licence that users can live with. ``make audit`` also asks for vulnerabilities."""

from __future__ import annotations

import json
import subprocess
from email.message import Message
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from tests import audit


def test_everything_that_is_needed_is_pinned() -> None:
    assert len(audit.needed()) > 20
    assert not audit.unpinned(), "run `make constraints`"


def test_licences_are_permissive() -> None:
    assert not list(audit.objectionable())


@pytest.mark.parametrize(
    ("licence", "fine"),
    [("MIT", True), ("BSD-3-Clause AND MPL-2.0", True), ("GPL-3.0-only", False), ("AGPL-3.0", False), ("", False), ("mine", False)],
)
def test_the_search_for_licences_finds_them(monkeypatch: pytest.MonkeyPatch, licence: str, fine: bool) -> None:
    metadata = Message()
    if licence:
        metadata["License-Expression"] = licence
    found = PathDistribution(Path("nowhere"))
    monkeypatch.setattr(PathDistribution, "metadata", metadata)
    monkeypatch.setattr(audit, "needed", lambda: {"thing": found})
    assert (not list(audit.objectionable())) is fine


@pytest.mark.parametrize(
    ("report", "found", "words"),
    [
        ({"dependencies": [{"name": "a", "skip_reason": "not found on PyPI"}]}, [], "not checked, the package registry"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, [], "1 of 1 packages checked, 0 with any"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]}, ["a 1: CVE-1"], "1 with any"),
        (None, [], "not checked, no advisory service"),
    ],
)
def test_an_advisory_service_that_is_not_there_is_said_and_not_taken_for_a_good_answer(
    monkeypatch: pytest.MonkeyPatch, report: object, found: list[str], words: str
) -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "" if report is None else json.dumps(report), "")

    monkeypatch.setattr(subprocess, "run", answer)
    listed, said = audit.vulnerabilities()
    assert listed == found
    assert words in said
