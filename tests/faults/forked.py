"""Cases of processes that fork, as data loaders do: a child that unwinds, and a child that outlives its killed parent."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from weightsync.coordinator.events import Event, Left
from weightsync.errors import WeightSyncError

__all__ = ["ORPHAN", "UNWIND", "Closable", "await_loss", "fork", "kept"]

ORPHAN = "orphan"
"""Fork a child that lives on, and kill the parent."""
UNWIND = "unwind"
"""Fork a child that closes what it inherited, and ends."""
_SOON = 3.0  # seconds in which a loss must be noticed; by missing answers alone it takes twice the heartbeat, 20
_LIFE = 60.0  # seconds after which an orphan ends, whatever became of the runner


class Closable(Protocol):
    """A trainer or an engine."""

    def close(self) -> None:
        """Leave."""
        ...


def fork(kind: str, made: Closable | None, sockets: tuple[int, ...]) -> int:
    """In a party: fork a child of this ``kind``, and return its process id; one that unwinds has ended by then.

    ``sockets`` are those of the runner, who must hear of the party's death whatever becomes of the child.
    """
    child = os.fork()
    if child:
        if kind == UNWIND:
            os.waitpid(child, 0)
        return child
    try:
        for fd in sockets:
            with suppress(OSError):
                os.close(fd)
        if kind == UNWIND:
            if made is not None:
                made.close()
            made = None
            gc.collect()
        else:
            threading.Event().wait(_LIFE)
    finally:
        os._exit(0)


def await_loss(events: Iterator[Event], member: str) -> str | None:
    """Wait until the coordinator says that ``member`` left; what is wrong if that takes long."""
    started = time.monotonic()
    for event in events:
        if isinstance(event, Left) and event.member == member:
            took = time.monotonic() - started
            return None if took < _SOON else f"the death of {member} was noticed after {took:.1f} s, since its forked child lives"
    raise WeightSyncError("the coordinator's events ended")


def kept(orphan: int) -> list[str]:
    """What an orphan keeps of a region. It is ended then."""
    root = Path(f"/proc/{orphan}")
    try:
        lines = (root / "maps").read_text().splitlines()
        for link in (root / "fd").iterdir():
            with suppress(OSError):
                lines.append(os.readlink(link))
        return [f"a forked child keeps {line.split()[-2:]}" for line in lines if "memfd:weightsync" in line]
    finally:
        with suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
