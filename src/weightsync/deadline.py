"""The one way in which a wait is bounded."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded

T = TypeVar("T")

_MOST_SECONDS = threading.TIMEOUT_MAX / 2  # half: a wait may add its own margin


class Deadline:
    """A point in this process's monotonic time after which its holder gives up.

    It crosses processes as the seconds that remain, never as a clock reading. Raises
    :class:`~weightsync.errors.ConfigurationError` unless ``seconds`` is above zero and not more than the system can wait for.
    """

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and 0 < seconds <= _MOST_SECONDS):
            raise ConfigurationError(f"a timeout must be above zero and at most {_MOST_SECONDS:.3g} seconds, not {seconds!r}")
        self.seconds = seconds
        self.at = self._now() + seconds

    def _now(self) -> float:
        return time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left; zero once it has passed."""
        return max(self.at - self._now(), 0.0)

    def remaining(self, what: str) -> float:
        """Seconds left, above zero. Raises :class:`~weightsync.errors.DeadlineExceeded` saying that ``what`` took too long."""
        if left := self.left:
            return left
        raise DeadlineExceeded(self._late(what))

    def result(self, future: Future[T], what: str, aborted: Future[Any] | None = None) -> T:
        """What ``future`` gives.

        Raises:
            DeadlineExceeded: ``what`` took too long.
            Aborted: ``aborted`` is done.
            BaseException: The error of ``future``.
        """
        try:
            if aborted is not None:
                wait((future, aborted), self.remaining(what), FIRST_COMPLETED)
                if aborted.done():
                    raise Aborted(f"{what} was aborted")
            return future.result(self.remaining(what))
        except TimeoutError as error:
            if future.done() and not future.cancelled() and future.exception() is error:
                raise  # its own
            raise DeadlineExceeded(self._late(what)) from None
        finally:
            del future  # its error's traceback refers to this frame, and would keep what the error's other frames refer to

    def _late(self, what: str) -> str:
        return f"{what} did not finish within {self.seconds:g} s"


@asynccontextmanager
async def within(seconds: float, late: Callable[[], str]) -> AsyncIterator[None]:
    """Cancel the block after so many seconds, and raise :class:`~weightsync.errors.DeadlineExceeded` with what ``late`` returns."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded(late()) from None
        raise
    finally:
        del scope  # and with it the task: the traceback of its error refers to this frame
