"""The process of the Megatron tests that runs trainer ranks (``megatron_ranks.py``), and the pipe to it. Imports no Megatron."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.megatron.megatron_cases import Case

__all__ = ["Ranks"]

ROOT = Path(__file__).parents[3]


class Ranks:
    """The process that has imported Megatron, from which the ranks of each case are forked. A case that fails ends it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._process: subprocess.Popen[str] | None = None
        self._busy = False

    def begin(self, case: Case, folder: Path) -> None:
        if self._busy:
            self.close()
        if self._process is None:
            self._start()
        self._busy = True
        self.write(json.dumps([asdict(case), str(folder)]))

    def _start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTSYNC_")}
        environment |= {"WEIGHTSYNC_PORT": "0", "PYTHONWARNINGS": "ignore"}  # Megatron warns of all that is not installed
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.megatron.megatron_ranks"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                start_new_session=True,
            )  # fmt: skip
        self.read("ready")

    def write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def read(self, key: str) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {}
        assert key in said, f"{said}\n{self._log.read_text()[-4000:]}"
        return said

    def end(self) -> None:
        """All ranks of the case have ended well."""
        assert set(self.read("ended")["ended"]) == {0}
        self._busy = False

    def close(self) -> None:
        if self._process is None:
            return
        if self._busy:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process, self._busy = None, False
