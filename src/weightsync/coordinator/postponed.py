"""Names with which something is done after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable


class Postponed:
    """Calls ``work`` with all names that were added since the last call, so many ``seconds`` after the first of them.

    One timer is for all: if each failure had one, and failed again, repetitions would add up and never end.
    """

    def __init__(self, seconds: float, work: Callable[[Iterable[str]], None]) -> None:
        self._seconds, self._work = seconds, work
        self._names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Add names, perhaps none."""
        waiting = bool(self._names)
        self._names.update(names)
        if self._names and not waiting:
            asyncio.get_running_loop().call_later(self._seconds, self._over)

    def _over(self) -> None:
        names, self._names = self._names, set()
        self._work(names)
