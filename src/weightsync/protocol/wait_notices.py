"""Telling whoever waits, after a moment and then ever more rarely, for whom it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["NOTICE_SECONDS", "reminding"]

NOTICE_SECONDS = 2.0
"""A call that waits for somebody says so after this time."""


@contextmanager
def reminding(tell: Callable[[], None], first: float = NOTICE_SECONDS) -> Iterator[None]:
    """Call ``tell`` ``first`` seconds from now, and then after twice, four times, ... as long, until the block ends."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle

    def due(seconds: float) -> None:
        nonlocal handle
        handle = loop.call_later(2 * seconds, due, 2 * seconds)
        tell()

    handle = loop.call_later(first, due, first)
    try:
        yield
    finally:
        handle.cancel()
