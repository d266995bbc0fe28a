"""Caches answers about the whole state, so that a client that polls does not delay the event loop of the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONG = 0.01
_KEPT = 10.0


class Snapshot:
    """What ``make`` returns. If that took long, the same is given again for ten times as long, while ``of()`` is the same object.

    So all that ask take a tenth of the loop's time at most. With fewer than a thousand agents each gets an answer of its own.
    """

    def __init__(self, make: Callable[[], bytes], of: Callable[[], object] = lambda: None) -> None:
        self._make, self._of = make, of
        self._made, self._made_of = b"", of()
        self._until = 0.0

    def get(self) -> bytes:
        """The answer, at most some hundreds of milliseconds old."""
        now = time.monotonic()
        if now < self._until and self._of() is self._made_of:
            return self._made
        began = time.thread_time()  # not the clock: on a busy machine that counts what others do
        self._made_of, made = self._of(), self._make()
        took = time.thread_time() - began
        self._made, self._until = (made, time.monotonic() + _KEPT * took) if took > _LONG else (b"", 0.0)
        return made
