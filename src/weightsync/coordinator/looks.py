"""The record of the looks at what a replica serves: it outlives rounds and connections, and so does the bound on their share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weightsync.model import Version

_MOST_ALARMS = 64


@dataclass
class Looks:
    """Times are the event loop's. A look that is withdrawn or fails took its time, too."""

    task: asyncio.Task[Any] | None = None
    """Waits for the next look, and carries it out."""
    holds: int = 0
    """Rounds that forbid looks now: it is updated, or others read from it."""
    failures: int = 0
    """Looks without a result, one after the other."""
    ended: float = -math.inf
    """End of the last look."""
    seconds: float = 0.0
    """Duration of the last look."""
    alarms: set[str] = field(default_factory=set)
    """Differences that were found in one version."""
    alarmed: Version | None = None
    """That version."""
    restless: Version | None = None
    """A version of which the same tensors differed again after it had been installed again."""
    _started: float | None = None

    @property
    def running(self) -> float:
        """Seconds of the look that runs; 0 if none does."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Look in the block."""
        self._started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.seconds, self._started = self.running, None
            self.ended = asyncio.get_running_loop().time()

    def alarm(self, version: Version, why: str) -> bool:
        """Note a difference. Returns whether the same was found before, since when the version has been installed again."""
        if self.alarmed != version or len(self.alarms) >= _MOST_ALARMS:  # a stolen rank may invent some for ever
            self.alarmed, self.alarms = version, set()
        again = why in self.alarms
        self.alarms.add(why)
        return again
