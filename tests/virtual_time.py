"""The simulation's event loop, for single tests: deadlines of minutes pass in microseconds. See ``tests.simulation.clock``."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.simulation.clock import VirtualTimeLoop, run

__all__ = ["VirtualTimeLoop", "run", "stubborn", "virtual"]

P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an async test run in virtual time."""

    @functools.wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return runs


async def stubborn() -> None:
    """Ignores being cancelled, for a virtual hour."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 3600
    while loop.time() < end:
        try:
            await asyncio.sleep(end - loop.time())
        except asyncio.CancelledError:
            continue
