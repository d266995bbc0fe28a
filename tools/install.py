"""Install locks into a virtual environment: ``python tools/install.py VENV LOCK... [OPTION...]``. Needs the standard library alone.

uv installs, in a fifth of pip's processor time: pip compares every archive that a package ever had. pip's own settings (indexes,
folders of archives, certificates, proxy) hold for uv too. pip installs if one of its settings is not known here, and if uv
fails. Options are those that both know. The status is 0 after a success, otherwise pip's.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["main", "settings", "uv_options"]

_LOCKED = ("--no-deps", "--require-hashes")
_OPTIONS = {"find-links": "--find-links", "trusted-host": "--allow-insecure-host"}
# Where a password may be: other users of the machine can read a process's arguments.
_VARIABLES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
_WITHOUT_EFFECT = (
    *("constraint", "prefer-binary"),  # a lock names exact versions
    "config-file",  # its settings are listed
    *("default-timeout", "timeout", "retries", "cache-dir", "no-cache-dir", "no-compile", "break-system-packages"),
    *("quiet", "verbose", "no-color", "progress-bar", "no-input", "log", "disable-pip-version-check", "root-user-action"),
)


def settings(listed: str) -> dict[str, str]:
    """pip's settings by name, from the output of ``pip config list``. Variables win over ``install``, that over ``global``."""
    lines = re.findall(r"^(global|install|:env:)\.([a-z-]+)=(.*)$", listed, re.MULTILINE)
    rank = ("global", "install", ":env:").index
    return {name: str(ast.literal_eval(value)) for _, name, value in sorted(lines, key=lambda line: rank(line[0]))}


def uv_options(of_pip: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """pip's settings as options and environment variables of uv; None if one of them is not known here."""
    if set(of_pip) - {"no-index", *_OPTIONS, *_VARIABLES, *_WITHOUT_EFFECT}:
        return None
    options = [part for name, option in _OPTIONS.items() for value in of_pip.get(name, "").split() for part in (option, value)]
    if of_pip.get("no-index", "0").lower() in {"1", "true", "yes", "on"}:
        options.append("--no-index")
    return options, {variable: " ".join(of_pip[name].split()) for name, variable in _VARIABLES.items() if name in of_pip}


def _uv(python: str, venv: Path, locks: Path) -> Path | None:
    """The environment's uv, which is installed into a folder that Python does not look into; None if it cannot be."""
    for uv in (venv / "bin" / "uv", venv / "uv" / "bin" / "uv"):
        if uv.exists():
            return uv
    entry = re.search(r"^uv==.*\n(?: .*\n)+", (locks / "main.txt").read_text(), re.MULTILINE)
    if entry is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write(entry[0])
        lock.flush()
        command = [python, "-m", "pip", "-qq", "install", "--no-compile", "--target", str(venv / "uv"), "--only-binary", ":all:"]
        subprocess.run([*command, *_LOCKED, "-r", lock.name], check=False)
    return uv if uv.exists() else None


def main(arguments: list[str]) -> int:
    """Install; returns 0, or pip's status."""
    venv, names = Path(arguments[0]), [name for name in arguments[1:] if name.endswith(".txt")]
    options = [*_LOCKED, *(name for name in arguments[1:] if name not in names), *(part for name in names for part in ("-r", name))]
    python = str(venv / "bin" / "python")
    listed = subprocess.run([python, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=False).stdout
    known = uv_options(settings(listed))
    if known is not None and (uv := _uv(python, venv, Path(names[0]).parent)) is not None:
        command = [str(uv), "--no-config", "--quiet", "pip", "install", "--python", python]
        command += ["--index-strategy", "unsafe-best-match", *known[0], *options]  # from all indexes, as pip: hashes are compared
        if subprocess.run(command, env=os.environ | known[1], check=False).returncode == 0:
            return 0
    return subprocess.run([python, "-m", "pip", "--quiet", "install", "--no-compile", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
