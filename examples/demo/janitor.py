"""Cleans up when the demo's main process is gone without having done so, even by SIGKILL: a pipe that ends tells it.

Reads lines from standard input: ``group NUMBER`` (a process group), ``directory PATH``, ``done`` (forget everything). When the
input ends, kills the groups and removes the directories that it still knows. Imports nothing heavy: it must be there first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Wait for the end of the input, then tidy."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever signals everything must not take the one that tidies
    groups: list[int] = []
    directories: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups.append(int(rest))
        elif word == "directory":
            directories.append(rest)
        elif word == "done":
            return 0
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
