"""Reminders for a caller that waits: what it waits for, at growing intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["NOTICE_SECONDS", "reminding"]

NOTICE_SECONDS = 2.0
"""Seconds after which a waiting call sends its first reminder."""


@contextmanager
def reminding(notify: Callable[[], None], first: float = NOTICE_SECONDS) -> Iterator[None]:
    """Call ``notify`` after ``first`` seconds, then after twice, four times, ... as many, until the block ends."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle

    def due(seconds: float) -> None:
        nonlocal handle
        handle = loop.call_later(2 * seconds, due, 2 * seconds)
        notify()

    handle = loop.call_later(first, due, first)
    try:
        yield
    finally:
        handle.cancel()
