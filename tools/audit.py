"""What weightsync depends on: ``python -m tools.audit`` checks pins and licences, and asks for known vulnerabilities where it can.

The first two need no network and are tests, too (``tests/unit/test_dependencies.py``). The third needs an advisory service; where
none is reachable it says so in one line and does not pretend to have looked. The exit status is 1 for whatever was found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("demo", "megatron", "otel", "store", "test", "fuzz", "browser", "docs", "dev")
BESIDE = ("ray-manager", "transport-nixl")
"""Folders of distributions of this repository that need more packages."""
NOT_PINNED = {"pip", "setuptools", "weightsync"}
"""Comes with Python's own environments, or is this project."""
BY_BUILD = re.compile(r"nvidia-|cuda-|triton$|torch$")
"""Come with the builds of torch for GPUs, at versions that torch itself pins."""
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|MPL|Mozilla Public|PSF|Python Software Foundation|Python-2\.0|Unlicense|0BSD|Zlib|CC0|HPND|BSL)\b",
    re.IGNORECASE,
)
UNNAMED = {"atheris": "Apache-2.0", "axe-playwright-python": "MIT AND MPL-2.0"}
"""Licences that a package's repository has and its metadata lacks."""
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|GNU (Affero|General|Lesser)|SSPL|BUSL|Commons Clause)\b", re.IGNORECASE)
_AUDIT_SECONDS = 300


def pins() -> list[str]:
    """The lines of ``constraints.txt``: ``name==version``, with a marker where a package has several versions."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def needed() -> dict[str, Distribution]:
    """Every installed distribution that weightsync needs, with its extras, directly or not."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # what is installed may be older
    direct = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    for folder in BESIDE:
        direct += tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["dependencies"]
    todo = [(wanted.name, frozenset(wanted.extras)) for wanted in map(Requirement, direct)]
    while todo:
        name, extras = todo.pop()
        if (canonicalize_name(name), extras) in seen:
            continue
        seen.add((canonicalize_name(name), extras))
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        found[canonicalize_name(name)] = here
        for text in here.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                todo.append((wanted.name, frozenset(wanted.extras)))
    return found


def unpinned() -> list[str]:
    """What is needed, and in no line of ``constraints.txt``, so that CI could get another version tomorrow."""
    known = {canonicalize_name(Requirement(pin).name) for pin in pins()}
    return sorted(name for name in needed() if name not in known and name not in NOT_PINNED and not BY_BUILD.match(name))


def licence_of(found: Distribution) -> str:
    """What its metadata says."""
    fields = dict(found.metadata.items())  # type: ignore[attr-defined]  # an email.message.Message
    if "License-Expression" in fields:
        return str(fields["License-Expression"])
    classifiers = [one.rpartition(" :: ")[2] for one in found.metadata.get_all("Classifier") or () if one.startswith("License ::")]
    text = str(fields.get("License", "")).strip()
    return (
        " OR ".join(one for one in classifiers if one != "OSI Approved")
        or text[:200]
        or UNNAMED.get(canonicalize_name(str(fields.get("Name", ""))), "")
    )


def objectionable() -> Iterator[str]:
    """Distributions with a licence that weightsync's users could not live with, or without any."""
    for name, found in sorted(needed().items()):
        licence = licence_of(found)
        if name in NOT_PINNED or (BY_BUILD.match(name) and name != "torch"):
            continue
        if COPYLEFT.search(licence) or not PERMISSIVE.search(licence):
            yield f"{name}: {licence or 'no licence named'}"


def vulnerabilities() -> tuple[list[str], str]:
    """What is known about the pinned versions; and in words how much was looked at."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{pin}\n" for pin in pins()))
        file.flush()
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "-r",
            file.name,
            "--no-deps",
            "--disable-pip",
            "-f",
            "json",
            "--progress-spinner",
            "off",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_AUDIT_SECONDS, check=False)
            report = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError, subprocess.TimeoutExpired):
            return [], "known vulnerabilities: not checked, no advisory service can be reached from here"
    # A registry without advisories answers "no such package" to each question, and pip-audit then ends with success.
    looked = [one for one in report if "skip_reason" not in one]
    found = [f"{one['name']} {one['version']}: {', '.join(v['id'] for v in one['vulns'])}" for one in looked if one["vulns"]]
    if not looked:
        return [], "known vulnerabilities: not checked, the package registry here has no advisories"
    return found, f"known vulnerabilities: {len(looked)} of {len(report)} packages checked, {len(found)} with any"


def main() -> int:
    """Say everything in three lines, and more only for what is wrong."""
    loose, licences = unpinned(), list(objectionable())
    found, said = vulnerabilities()
    print(f"pins: {len(pins())} exact versions, {len(loose)} packages without one {' '.join(loose)}".rstrip())
    print(f"licences: {len(needed())} packages, {len(licences)} to look at")
    print(said)
    for line in (*licences, *found):
        print(f"  {line}")
    return 1 if loose or licences or found else 0


if __name__ == "__main__":
    sys.exit(main())
