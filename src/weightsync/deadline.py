"""The one way in which a wait is bounded."""

from __future__ import annotations

import math
import time

from weightsync.errors import ConfigurationError, DeadlineExceeded

__all__ = ["Deadline"]


class Deadline:
    """A point in this process's monotonic time after which its holder gives up.

    It crosses processes as the seconds that remain, never as a clock reading. Raises
    :class:`~weightsync.errors.ConfigurationError` unless ``seconds`` is a positive, finite number.
    """

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigurationError(f"a deadline must be a positive number of seconds, not {seconds!r}")
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def remaining(self, what: str) -> float:
        """Seconds left, above zero. Raises :class:`~weightsync.errors.DeadlineExceeded` saying that ``what`` took too long."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{what} did not finish within {self.seconds:g} s")
        return left
