"""Between requests that read the weights and a round that writes them: one lock, one label."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ProtocolError, WeightSyncError
from weightsync.model import PauseMode, Version

__all__ = ["Gate", "NotSeeded"]


class NotSeeded(WeightSyncError):
    """This replica has never held a version: its weights are noise."""


class Gate:
    """Lets generation through while the weights have a name, and nobody else while they have none.

    The label is read under the lock that admits a run, and it cannot change before that run left: so what :meth:`entered`
    yields is the version of every forward pass inside. A new gate is closed and has no label.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._ended = False
        self._seeded = False
        self._version: Version | None = None
        self._running = 0
        self._mode: PauseMode = "wait"
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether runs must leave at their next token. Read at every token, without the lock."""
        return self._stopping

    @property
    def mode(self) -> PauseMode:
        """How the current pause treats who runs; stable for a run that has not left yet."""
        return self._mode

    @property
    def version(self) -> Version | None:
        """The version that is served right now; ``None`` while paused or never seeded."""
        with self._changed:
            return self._version if self._open else None

    @property
    def seeded(self) -> bool:
        """Whether a version was ever committed here."""
        return self._seeded

    @property
    def idle(self) -> bool:
        """Closed, and nobody inside."""
        with self._changed:
            return not self._open and self._running == 0

    @contextmanager
    def entered(self, deadline: Deadline) -> Iterator[Version]:
        """Wait until the gate is open, run inside, and know under which version.

        Raises :class:`NotSeeded` at once if no version was ever committed, :class:`~weightsync.errors.DeadlineExceeded` if the
        gate stays closed, :class:`~weightsync.errors.Aborted` if the server ends.
        """
        with self._changed:
            if not self._seeded:
                raise NotSeeded("this replica was not seeded yet: its weights are noise until the first version is committed")
            while not (self._open and self._version is not None):
                if self._ended:
                    raise Aborted("the server is ending")
                self._changed.wait(deadline.remaining("waiting for new weights"))
            self._running += 1
            version = self._version
        try:
            yield version
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Close, and return when nobody is inside. From the call on, the weights have no label.

        Raises :class:`~weightsync.errors.DeadlineExceeded` if somebody is still inside after ``timeout`` seconds; the gate then
        stays closed.
        """
        deadline = Deadline(timeout)
        with self._changed:
            self._open, self._version, self._mode = False, None, mode
            self._stopping = mode != "wait"
            while self._running:
                self._changed.wait(deadline.remaining(f"pausing ({mode}) with {self._running} requests running"))

    def label(self, version: Version) -> None:
        """Name the weights. Raises :class:`~weightsync.errors.ProtocolError` unless the gate is paused and empty."""
        with self._changed:
            if self._open or self._running:
                raise ProtocolError(f"{version} cannot be committed: generation is running")
            self._version, self._seeded = version, True

    def resume(self) -> None:
        """Open. Raises :class:`~weightsync.errors.ProtocolError` if the weights have no label."""
        with self._changed:
            if self._version is None:
                raise ProtocolError("this replica will not serve weights that were never committed")
            self._open, self._stopping = True, False
            self._changed.notify_all()

    def end(self) -> None:
        """Close for good and send everybody away, also those who wait."""
        with self._changed:
            self._open, self._ended, self._version, self._mode = False, True, None, "abort"
            self._stopping = True
            self._changed.notify_all()
