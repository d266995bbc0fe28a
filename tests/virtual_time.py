"""The simulation's event loop, for single tests: deadlines of minutes pass in microseconds. See ``tests.simulation.clock``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.simulation.clock import VirtualTimeLoop, run

__all__ = ["VirtualTimeLoop", "run", "virtual"]

P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an async test run in virtual time."""

    @functools.wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return runs
