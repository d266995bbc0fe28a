"""The files that ``make`` installs, with the hash of every archive: ``python -m tools.lock`` makes them.

============================  ==============================================================================================
file in ``locks``             what it holds
============================  ==============================================================================================
``torch-cpu.txt``             a build of torch without CUDA that does not come from the package index, if pip here knows one
``main.txt``                  everything that ``.venv`` needs, for every Python and platform that the packages have builds for
``cuda.txt``                  libraries that builds of torch for GPUs need, and its builds for CPUs do not
``atheris.txt``, ...          packages that are left out where they have no build: Atheris, NIXL, Playwright, Ray
``megatron.txt``              the same, for ``.venv`` and ``.venv-vllm``
``docs.txt``                  what the site and its pictures need and nothing else does: for ``make docs`` and ``make test``
``vllm.txt``                  what ``.venv-vllm`` holds; made if that is there, and for its Python only
``verl.txt``                  ``constraints-verl.txt``: what ``.venv-verl`` holds on top of ``.venv``
``areal.txt``                 ``constraints-areal.txt``: what ``.venv-areal`` holds on top of ``.venv``
``megatron-bridge.txt``       ``constraints-megatron-bridge.txt``: Megatron-Bridge and mbridge, without their dependencies
``router.txt``                ``constraints-router.txt``: sglang-router, without its dependencies
``openrlhf.txt``              ``constraints-openrlhf.txt``: what ``.venv-openrlhf`` holds on top of ``.venv-vllm`` and ``.venv``
``sglang.txt``                ``constraints-sglang.txt``: what ``.venv-sglang`` holds on top of ``.venv``
``nemo-rl.txt``               ``constraints-nemo-rl.txt``: what ``.venv-nemo-rl`` holds on top of ``.venv``
============================  ==============================================================================================

``tools/install.py`` installs them, ``--no-deps --require-hashes``. Versions are those of ``constraints.txt``, which gets what it
lacks: remove a line there to have the newest version, or add a dependency to ``pyproject.toml``. uv resolves, and asks the package
index for the hashes. Torch's build for CPUs is a separate file since pip prefers an archive whose hash an index tells.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from packaging.utils import canonicalize_name

from tools.audit import BESIDE, BY_BUILD, ROOT, pins

__all__ = ["FOLDER", "Entry", "hashes", "main", "named", "write"]

FOLDER = ROOT / "locks"
_PINS = ROOT / "constraints.txt"
OPTIONAL = {"atheris": "atheris", "megatron": "megatron-core", "nixl": "nixl-cu13", "playwright": "playwright", "ray": "ray"}
"""Package by file, where a Python or platform may have no build of it."""
ON_TOP = ("areal", "megatron-bridge", "nemo-rl", "openrlhf", "router", "sglang", "verl")
"""Frameworks with an environment on top of ``.venv``, and what is installed into it without its dependencies."""
_BUILD_TOOLS = ("hatchling", "editables")
_PYTHON = "3.11"
_VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
_NOT_IN_VLLM = {"pip", "weightsync", "megatron-core"}


class Entry(NamedTuple):
    """One version of a package in a lock."""

    version: str
    marker: str
    """Where it is taken: empty, or `` ; `` and an environment marker."""
    archives: list[str]
    """SHA-256 hashes."""


Entries = dict[str, list[Entry]]
"""By canonical name. A package has several entries if its version depends on the Python or the platform."""
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+?)( ;.*?)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")


def hashes(text: str) -> Entries:
    """The entries of a lock."""
    entries: Entries = {}
    for name, version, marker, listed in _ENTRY.findall(text):
        entries.setdefault(canonicalize_name(name), []).append(Entry(version, marker, _SHA256.findall(listed)))
    return entries


def named(entries: Entries) -> list[str]:
    """The pins of a constraints file: with the marker where a package has several."""
    return [
        f"{package}=={entry.version}{entry.marker if len(listed) > 1 else ''}"
        for package, listed in sorted(entries.items())
        for entry in listed
    ]


def _compile(requirements: Sequence[str], constraints: Iterable[str], *options: str) -> Entries:
    inputs = ROOT / ".lock.in", ROOT / ".lock.constraints"
    for path, lines in zip(inputs, (requirements, constraints), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--native-tls", "--universal", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "--python-version", _PYTHON, "-c", str(inputs[1]), str(inputs[0]), *options]
    try:
        return hashes(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    finally:
        for path in inputs:
            path.unlink()


def write(name: str, entries: Entries) -> None:
    """Write the lock ``name``."""
    lines = ["# Made by 'make constraints'; installed with --no-deps --require-hashes."]
    for package, listed in sorted(entries.items()):
        for version, marker, archives in listed:
            pinned = f"{package}=={version}{marker} \\\n"
            lines.append(pinned + " \\\n".join(f"    --hash=sha256:{archive}" for archive in sorted(set(archives))))
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


def _local_torch(version: str) -> None:
    """Write down the build of torch that pip on this machine takes, if it is not the index's; others of its version stay listed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--report", "-", f"torch=={version}"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)["install"][0]
    taken = report["metadata"]["version"]
    if "+" not in taken:
        return
    earlier = hashes((FOLDER / "torch-cpu.txt").read_text()) if (FOLDER / "torch-cpu.txt").exists() else {}
    archives = [report["download_info"]["archive_info"]["hashes"]["sha256"]]
    archives += [archive for entry in earlier.get("torch", ()) if entry.version == taken for archive in entry.archives]
    write("torch-cpu", {"torch": [Entry(taken, "", archives)]})


def _needed_beside() -> list[str]:
    """What distributions of this repository need, except weightsync itself."""
    projects = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in BESIDE]
    return [text for project in projects for text in project["dependencies"] if text != "weightsync"]


def main() -> int:
    """Write every lock."""
    FOLDER.mkdir(exist_ok=True)
    every = ("demo", "otel", "store", "test", "dev", "megatron", "fuzz", "browser")
    extras = [option for extra in every for option in ("--extra", extra)]
    needed = [*_BUILD_TOOLS, *_needed_beside()]
    entries = _compile(needed, pins(), "pyproject.toml", *extras)
    with_docs = _compile(needed, pins(), "pyproject.toml", *extras, "--extra", "docs")
    docs = {name: entry for name, entry in with_docs.items() if entries.get(name) != entry}
    del entries["pip"]  # comes with every environment
    head = [line for line in _PINS.read_text().splitlines() if line.startswith("#")]
    by_build = {name for name in entries if BY_BUILD.match(name) and name != "torch"}
    ours = {name: listed for name, listed in (entries | docs).items() if name not in by_build}
    _PINS.write_text("\n".join([*head, *named(ours)]) + "\n")
    for name, package in OPTIONAL.items():
        write(name, {package: entries.pop(package)})
    write("docs", docs)
    write("cuda", {name: entries.pop(name) for name in by_build})
    write("main", entries)
    _local_torch(entries["torch"][0].version)
    for framework in ON_TOP:
        pinned = [line for line in (ROOT / f"constraints-{framework}.txt").read_text().splitlines() if not line.startswith("#")]
        write(framework, _compile(pinned, (), "--no-deps"))
    if _VLLM_PYTHON.exists():
        command = [str(_VLLM_PYTHON), "-m", "pip", "freeze", "--disable-pip-version-check", "--all", "--exclude-editable"]
        frozen = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        held = [re.sub(r"^(torch==[^+]*)\+.*", r"\1", line) for line in frozen if re.split(r"==| @ ", line)[0] not in _NOT_IN_VLLM]
        write("vllm", _compile(held, (), "--no-deps"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
