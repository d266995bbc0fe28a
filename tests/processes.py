"""Processes that tests start: who descends from whom, and an end for all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LASTING = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "weightsync_testing.fork_server",
)

_SUBREAPER, _IS_SUBREAPER = 36, 37
"""Of ``prctl``: what a descendant leaves behind when it ends becomes a child of this process, and not of the first one."""


def children(parent: int) -> dict[int, str]:
    """Living descendants of ``parent``: process id to command line."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: dict[int, str] = {}
    todo = [parent]
    while todo:
        above = todo.pop()
        for pid in below.get(above, []):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            todo.append(pid)
            if above != parent or not any(name in command for name in _LASTING):
                found[pid] = command
    return found


@contextmanager
def none_outlives() -> Iterator[None]:
    """Kill what was started in the block and still runs, also processes in other sessions whose parents have ended.

    A launcher such as torchrun gives each worker a session of its own: a signal to the launcher's group does not reach them. Blocks
    may nest: what was started in the outer one, and left behind in the inner one, is killed by the outer one.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    before, was = children(os.getpid()).keys(), ctypes.c_int(0)
    prctl(_IS_SUBREAPER, ctypes.byref(was), 0, 0, 0)  # in such a block, or in none
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for _ in range(100):  # what a killed process leaves behind comes next
            left = children(os.getpid()).keys() - before
            if not left:
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            threading.Event().wait(0.05)
            for pid in left:
                with suppress(ChildProcessError):  # another one's child
                    os.waitpid(pid, os.WNOHANG)
        prctl(_SUBREAPER, was.value, 0, 0, 0)
