"""Requests of a trainer rank to publish: arguments checked, calls counted.

A framework's call of its engine, and the publication that it lets in: if one fails, the other ends.
"""

from __future__ import annotations

import operator
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import get_args

from msgspec import structs

from weightsync.errors import ConfigurationError, VersionError, WeightSyncError, readable
from weightsync.model import PauseMode
from weightsync.outcome import Latch
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import EndCall, Publish

_TELLING_SECONDS = 5.0
_MESSAGE_CHARS = 4000


class FrameworkCall:
    """A call of a framework's engine, in which the next publication of this thread is let in. Its trainer may end it."""

    def __init__(self) -> None:
        self.number = secrets.randbits(48) + 1
        self.refused = False
        """Whether the publication was told that the call had failed."""
        self.link: CoordinatorConnection | None = None
        """The trainer's, once it is known."""
        self.known, self._lock = Latch(), threading.Lock()
        self._over = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Publish in the block. If that fails, or the call has, the call is ended, and no later one is taken for it."""
        token, failed = _call.set(self), ""
        try:
            yield
        except BaseException as raised:
            failed = f": {type(raised).__name__}: {raised}"
            raise
        finally:
            _call.reset(token)
            self.known.set()
            with self._lock:
                self._over = True
                if self.refused or failed:
                    end_call(self.link, self.number, f"the publication is over{failed}")

    def failed(self, reason: str, timeout: float) -> None:
        """End the publication: the call has failed. ``timeout`` bounds the wait for its beginning."""
        self.known.wait(timeout)
        with self._lock:
            if not self._over and self.link is not None:
                self.refused = True
                end_call(self.link, self.number, reason, refuse=True)


def end_call(link: CoordinatorConnection | None, number: int, reason: str, *, refuse: bool = False) -> None:
    """End the framework's call of this number, over a trainer's ``link``, if there is one: see :class:`EndCall`."""
    if link is not None:
        with suppress(WeightSyncError):
            link.call(EndCall(number, readable(reason, _MESSAGE_CHARS), refuse), _TELLING_SECONDS)


_call: ContextVar[FrameworkCall | None] = ContextVar("framework_call", default=None)


def note_trainer(link: CoordinatorConnection | None) -> None:
    """Tell the call for which this thread publishes, if there is one, by whom."""
    call = _call.get()
    if call is not None:
        call.link = link
        call.known.set()


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
