"""Requests of a trainer rank to publish: arguments checked, calls counted."""

from __future__ import annotations

import operator
from typing import get_args

from msgspec import structs

from weightsync.errors import ConfigurationError, VersionError
from weightsync.model import PauseMode
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import Publish
from weightsync.trainer.framework_call import note_trainer


class PublishRequests:
    """Makes the requests of one trainer rank, and counts them: without numbers, ranks' calls with equal counts belong together.

    A call that fails or is interrupted counts as well, so that those after it still do.
    """

    def __init__(self, mode: PauseMode | None) -> None:
        self._mode = known_mode(mode)
        self.link: CoordinatorConnection | None = None
        self._started = False
        self.count = self.start = 0
        """Calls without a step: of this process, after those that the other ranks had begun when it started; and those alone."""
        self._of_step = 0, 0  # the last step, and the calls in a row with it

    def start_after(self, count: int) -> None:
        """Count on from ``count``, which the first coordinator that was connected to gave. Later ones change nothing."""
        if not self._started:
            self._started, self.count, self.start = True, count, count

    def count_on(self, asked: Publish, count: int) -> Publish:
        """Return ``asked`` as call ``count``, and count on from there: the other ranks, who were not here before, are at it."""
        if asked.step is None:
            self.count, self.start = self.count + count - asked.count, self.start + count - asked.count
        else:
            self._of_step = asked.step, count
        return structs.replace(asked, count=count)

    def make(self, number: int | None, step: int | None, mode: PauseMode | None) -> Publish:
        """Return the request for the call that begins now.

        Raises:
            VersionError: ``number`` is no version number.
            ConfigurationError: ``step`` is no integer of 64 bits, or ``mode`` is unknown.
        """
        note_trainer(self.link)
        if step is None:
            count = self.count = self.count + 1
        else:
            plain = _integer(step, -1 << 63)
            if plain is None:
                raise ConfigurationError(f"a step is an integer of 64 bits, not {step!r}")
            step = plain
            last, times = self._of_step
            self._of_step = step, times + 1 if step == last else 1
            count = self._of_step[1]
        version = None if number is None or isinstance(number, bool) else _integer(number, 0)
        if version is None and number is not None:
            raise VersionError(f"a version is an integer from 0 to 2^63 - 1, not {number!r}")
        return Publish(version, 0, step, known_mode(mode) or self._mode, count=count)


def _integer(value: int, least: int) -> int | None:
    """Return ``value`` as a plain integer, or ``None`` if it is none from ``least`` to 2^63 - 1."""
    try:
        plain = operator.index(value)  # NumPy's and torch's integers, too
    except TypeError:
        return None
    return plain if least <= plain < 1 << 63 else None


def known_mode(mode: PauseMode | None) -> PauseMode | None:
    """Return ``mode``. Raises :class:`~weightsync.errors.ConfigurationError` if there is no such pause mode."""
    if mode is not None and mode not in get_args(PauseMode):
        raise ConfigurationError(f"pause_mode is one of {', '.join(get_args(PauseMode))}, not {mode!r}")
    return mode
