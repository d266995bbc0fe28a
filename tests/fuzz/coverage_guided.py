"""Coverage-guided fuzzing of every target with Atheris: ``python -m tests.fuzz.coverage_guided --seconds 30``.

One process runs all targets, the first byte of an input says which, so that a short run reaches all of them. A finding does not end
the run: each kind is written to ``--findings`` once, with the command that repeats it. Ends with one JSON line; the exit status is
0 only without findings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HEAD_ROOM = 1 << 30
"""Bytes that one input may make the process allocate; more is a finding (MemoryError)."""
_INPUT_SECONDS = 10
_LONGEST = 8192
_COMPILED = ["weightsync.tensors.kernels", "weightsync.tensors.intrinsics", "weightsync.tensors.cuda"]  # Numba reads their bytecode


def child(names: list[str], seconds: int, corpus: Path, findings: Path) -> None:
    """Fuzz in this process; never returns."""
    import atheris

    with atheris.instrument_imports(include=["weightsync"], exclude=_COMPILED):
        from tests.fuzz.targets import TARGETS
    from weightsync.errors import WeightSyncError

    for number, name in enumerate(names):
        for seed in TARGETS[name].seeds:
            TARGETS[name].run_quietly(seed)  # whatever is made once (a compiled loop, a region) is made before the limit
            (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(bytes([number]) + seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEAD_ROOM, used + _HEAD_ROOM))
    counts = dict.fromkeys(names, 0)
    seen: set[str] = set()
    last = time.monotonic()

    def one(data: bytes) -> None:
        nonlocal last
        name = names[(data[0] if data else 0) % len(names)]
        counts[name] += 1
        try:
            TARGETS[name].run(data[1:])
        except WeightSyncError:
            pass
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{name}-{type(error).__name__}-{Path(where.filename).stem}-{where.lineno}"
            if kind not in seen:
                seen.add(kind)
                (findings / kind).write_bytes(data[1:])
                (findings / f"{kind}.txt").write_text("".join(traceback.format_exception(error))[-4000:])
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            (findings / "counts.json").write_text(json.dumps(counts))

    options = [
        f"-max_total_time={seconds}",
        f"-max_len={_LONGEST}",
        f"-timeout={_INPUT_SECONDS}",
        "-rss_limit_mb=0",
        "-len_control=0",
    ]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={findings}/", str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    """Run, report, and say how to repeat what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=25)
    parser.add_argument("--only", default="", help="names of targets, with commas")
    parser.add_argument("--findings", type=Path, default=None)
    parser.add_argument("--corpus", type=Path, default=None, help="kept between runs, so that a later one goes on where this ended")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--repeat", nargs=2, metavar=("TARGET", "FILE"), help="run one input and show what it raises")
    given = parser.parse_args()
    if given.child:
        child(given.only.split(","), given.seconds, given.corpus, given.findings)
    from tests.fuzz.targets import TARGETS

    if given.repeat:
        TARGETS[given.repeat[0]].run(Path(given.repeat[1]).read_bytes())
        return 0
    names = given.only.split(",") if given.only else list(TARGETS)
    with tempfile.TemporaryDirectory() as scratch:
        findings, corpus = given.findings or Path(scratch, "findings"), given.corpus or Path(scratch, "corpus")
        for folder in (findings, corpus):
            folder.mkdir(parents=True, exist_ok=True)
        for old in findings.iterdir():
            old.unlink()
        command = [sys.executable, "-m", "tests.fuzz.coverage_guided", "--child", f"--seconds={given.seconds}"]
        command += [f"--only={','.join(names)}", f"--corpus={corpus}", f"--findings={findings}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=given.seconds + 120)
        found = sorted(path for path in findings.iterdir() if path.suffix not in (".txt", ".json"))
        counts = json.loads((findings / "counts.json").read_text()) if (findings / "counts.json").exists() else {}
        for path in found:
            report = findings / f"{path.name}.txt"
            print(report.read_text() if report.exists() else "(killed: too slow, or a crash below Python)", file=sys.stderr)
            print(f"{path.name}: {path.read_bytes()!r}\n", file=sys.stderr)
        ended = done.returncode == 0 and bool(counts)
        if not ended:
            print(done.stderr[-4000:], file=sys.stderr)
        idle = [name for name in names if not counts.get(name)]
        ok = ended and not found and not idle
        result = {"ok": ok, "executions": sum(counts.values()), "targets": counts, "never_run": idle, "findings": len(found)}
        print(json.dumps(result))
        return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
