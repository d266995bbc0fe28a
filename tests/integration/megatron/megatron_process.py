"""The process of the Megatron tests that runs trainer ranks (``megatron_ranks.py``), and the pipe to it. Imports no Megatron."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.megatron.megatron_cases import Case
from tests.processes import ChildProcess

__all__ = ["Ranks"]

_SECONDS = 300.0
"""For an answer: the ranks import Megatron, and compile."""


class Ranks:
    """The process that has imported Megatron, from which the ranks of each case are forked. A case that fails ends it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._process: ChildProcess | None = None
        self._busy = False

    def begin(self, case: Case, folder: Path) -> None:
        if self._busy:
            self.close()
        if self._process is None:
            self._start()
        self._busy = True
        self.write(json.dumps([asdict(case), str(folder)]))

    def _start(self) -> None:
        with self._log.open("w") as errors:
            self._process = ChildProcess(
                "-m", "tests.integration.megatron.megatron_ranks", stderr=errors.fileno(), without=("WEIGHTSYNC_",),
                environment={"WEIGHTSYNC_PORT": "0", "PYTHONWARNINGS": "ignore"},  # Megatron warns of all that is not installed
            )  # fmt: skip
        self.read("ready")

    def write(self, line: str) -> None:
        assert self._process is not None
        self._process.write(line)

    def read(self, key: str) -> Any:
        assert self._process is not None
        answer = json.loads(self._process.line(_SECONDS))
        assert key in answer, f"{answer}\n{self._log.read_text()[-4000:]}"
        return answer

    def end(self) -> None:
        """All ranks of the case have ended well."""
        assert set(self.read("ended")["ended"]) == {0}
        self._busy = False

    def close(self) -> None:
        if self._process is None:
            return
        with self._process:
            if not self._busy:
                self._process.end()
        self._process, self._busy = None, False
