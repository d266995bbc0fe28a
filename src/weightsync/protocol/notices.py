"""Notices that a person must see, whether or not the program configures logging, and reminders of what a caller waits for."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE_SECONDS = 2.0
"""Seconds after which a waiting call sends its first reminder."""


def tell(log: logging.Logger, text: str) -> None:
    """Log ``text`` as a warning. If no handler of ``log`` writes to a terminal but standard error is one, print it there."""
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)  # the text may come from another process
    log.warning("%s", text)
    if _terminal(sys.stderr) and not _shown(log):
        print(f"weightsync: {text}", file=sys.stderr, flush=True)


def _terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def _shown(log: logging.Logger) -> bool:
    """Whether a warning to ``log`` reaches a terminal. Without any handler, Python prints it itself."""
    if not log.hasHandlers():
        return True
    current: logging.Logger | None = log
    while current is not None:
        if any(isinstance(handler, logging.StreamHandler) and _terminal(handler.stream) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


@contextmanager
def reminding(notify: Callable[[], None]) -> Iterator[None]:
    """Call ``notify`` after :data:`NOTICE_SECONDS`, then after twice, four times, ... as many, until the block ends."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle

    def due(seconds: float) -> None:
        nonlocal handle
        handle = loop.call_later(2 * seconds, due, 2 * seconds)
        notify()

    handle = loop.call_later(NOTICE_SECONDS, due, NOTICE_SECONDS)
    try:
        yield
    finally:
        handle.cancel()
