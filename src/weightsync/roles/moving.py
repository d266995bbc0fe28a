"""What surrounds a move: seconds of its parts, and Python's garbage collection held off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Clock", "no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python's garbage wait: collecting all of it takes a tenth of a second in a process with many tensors, engines paused."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass
class Clock:
    """Seconds spent in each part of a move; parts that overlap are each counted in full.

    What is received is digested in the same pass over memory, so ``digest`` is only what is read again after a loader.
    """

    receive: float = 0.0
    load: float = 0.0
    digest: float = 0.0
