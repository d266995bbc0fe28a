"""Shared memory that vLLM's processes have mapped, and that nobody frees when a signal ends them all at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["free", "mapped_by"]

_NAMES = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")


def mapped_by(group: int) -> set[str]:
    """Paths of what the processes of this process group have mapped now. Empty without ``/proc``."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                found |= {path for path in (process / "maps").read_text().split() if path.startswith(_NAMES)}
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return found


def free(paths: Iterable[str]) -> None:
    """Remove them; those that are gone are no error."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
