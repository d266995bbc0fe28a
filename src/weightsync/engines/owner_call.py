"""Updates inside a call of the framework that owns an engine. The call is the pause, and its end the resumption."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, RoundFailed
from weightsync.model import PauseMode

_ANSWER_SECONDS = 1.0  # a wait for a call ends this much before the update does, so that the update can say why
_GRACE = 10.0  # seconds after the deadline of an update in which its end must be known here


class _LastingCall:
    """A call that lasts."""

    def __init__(self, number: int | None, epoch: int | None, deadline: Deadline, name: int) -> None:
        self.number, self.epoch, self.name = number, epoch, name
        self.deadline = deadline
        self.waited = 0.0
        self.limit: Deadline | None = None
        """Until when the update must have ended; ``None`` before one has entered."""
        self.work: Callable[[], None] | None = None
        self.worked: BaseException | None = None
        self.over = False
        self.error: Exception | None = None

    def takes(self, order: tuple[int, int] | None) -> bool:
        """Whether an update to the version of this epoch and number may enter."""
        if self.over or self.limit is not None:
            return False
        if order is None or self.number is None:
            return True
        epoch, number = order
        return (self.epoch or epoch, self.number) <= (epoch, number)

    @property
    def wanted(self) -> str:
        """The version that the caller asked for, for messages."""
        return "a version" if self.number is None else f"version {self.number}"


class OwnerCall:
    """Where a framework's call and weightsync's rounds meet.

    The framework calls :meth:`serve` on the thread that runs the model, so that no step starts while the call lasts. The other
    methods are those of :class:`~weightsync.engines.vllm.controls.Controls` and of an adapter, called from weightsync's thread: a
    round waits in :meth:`pause` for such a call, and ends it in :meth:`resume`, or in :meth:`aborted` if it fails. The engine is
    never paused, flushed or resumed from here.

    Args:
        load: Loads the staged weights. Runs on the framework's thread.
        member: Name of the rank in messages.
    """

    def __init__(self, load: Callable[[], None], member: str) -> None:
        self._load, self._member = load, member
        self._changed = threading.Condition()
        self._call: _LastingCall | None = None
        self._order: tuple[int, int] | None = None
        self._given_up: str | None = None
        self._ended = 0, ""  # the number of a call that is over, and why
        self._refused: str | None = None
        self._entered_name = 0
        """The number of the last call that an update entered."""

    def serve(self, number: int | None, epoch: int | None, timeout: float, name: int = 0) -> float:
        """Let one update in and return at its end the seconds until it came. Runs on the framework's thread.

        An update that entered in time may last longer than ``timeout``: until its own deadline.

        Args:
            number: Number of the version to wait for; later versions also do. ``None`` for any.
            epoch: Epoch of that version; ``None`` for any.
            timeout: Seconds in which an update must come.
            name: Number of this call for :meth:`ended`; 0 for none.

        Raises:
            Aborted: Nothing is published. The engine was not changed.
            ConfigurationError: Another call lasts.
            DeadlineExceeded: None came. The engine was not changed.
            RoundFailed: It failed. The weights may be those of two versions.
        """
        call = _LastingCall(number, epoch, Deadline(timeout), name)
        with self._changed:
            if self._call is not None:
                raise ConfigurationError(f"{self._member}: another call for an update lasts: a framework makes one at a time")
            self._call, self._refused = call, None
            self._end_waiting()
            self._changed.notify_all()
        try:
            while (work := self._next(call)) is not None:
                worked: BaseException | None = None
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - raised by the round, and below
                    worked = error
                with self._changed:
                    call.work, call.worked = None, worked
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._call = None
                self._changed.notify_all()
        if call.error is not None:
            raise call.error
        return call.waited

    def _next(self, call: _LastingCall) -> Callable[[], None] | None:
        """Wait for work, and return it; ``None`` at the end of the call."""
        with self._changed:
            if not self._changed.wait_for(lambda: call.limit or call.over, call.deadline.left):
                call.over = True
                call.error = DeadlineExceeded(
                    f"{self._member}: no update to {call.wanted} came within {call.deadline.seconds:g} s, and the engine keeps its "
                    "weights. Call it while the trainer publishes, and give it as much time"
                )
            elif call.limit is not None and not self._changed.wait_for(lambda: call.work or call.over, call.limit.left):
                call.over = True
                call.error = RoundFailed(
                    f"{self._member}: the update that entered this call did not end in time, and the weights may be those of two "
                    "versions: do not resume the engine before another update succeeds"
                )
            return None if call.over else call.work

    # From weightsync's thread.

    def announced(self, order: tuple[int, int] | None) -> None:
        """Take note of the version for which the next pause is."""
        with self._changed:
            self._order, self._given_up = order, None

    def ended(self, name: int, reason: str, refuse: bool) -> None:
        """End the call of this number, now or when it comes, unless an update has entered. Any thread.

        With ``refuse`` the call has failed, and a pause does not wait for it, until the next call or the next :meth:`ended`. If an
        update had entered the call, that update is over, and a pause is another update's, which waits for another call.
        """
        with self._changed:
            self._ended, self._refused = (name, reason), reason if refuse and name != self._entered_name else None
            self._end_waiting()
            self._changed.notify_all()

    def _end_waiting(self) -> None:
        call, (name, reason) = self._call, self._ended
        if call is not None and call.name == name != 0 and call.limit is None and not call.over:
            call.over, call.error = True, Aborted(f"{self._member}: {reason}. The engine keeps its weights")

    def aborted(self, reason: str) -> None:
        """End the call in which an update is, or the update's wait for one. Any thread. Never blocks for long."""
        reason = reason or "its connection to the coordinator broke"
        with self._changed:
            self._given_up = reason
            call = self._call
            if call is not None and call.limit is not None and not call.over:
                call.over = True
                call.error = RoundFailed(
                    f"{self._member}: the update failed, and the weights may be those of two versions: do not resume the engine "
                    f"before another update succeeds: {reason}"
                )
            self._changed.notify_all()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Wait for a call that takes the announced version. The framework has paused its engine in its own way.

        Raises:
            DeadlineExceeded: None came.
            Aborted: The update was given up.
        """
        deadline, order = Deadline(timeout), self._order
        patience = timeout - min(_ANSWER_SECONDS, timeout / 10)
        with self._changed:
            self._changed.wait_for(
                lambda: self._given_up or self._refused or (self._call is not None and self._call.takes(order)), patience
            )
            given_up = self._given_up or self._refused
            if given_up:
                raise Aborted(f"the update was given up before the framework called {self._member}: {given_up}")
            if self._call is None or not self._call.takes(order):
                waits = "" if self._call is None else f" (its call waits for {self._call.wanted})"
                raise DeadlineExceeded(
                    f"the framework that owns {self._member} did not let the update in within {patience:.3g} s{waits}: it must "
                    "call all ranks of the engine while the trainer publishes. The engine keeps its weights"
                )
            self._call.waited = self._call.deadline.seconds - self._call.deadline.left
            self._call.limit = Deadline(deadline.left + _GRACE)
            self._entered_name = self._call.name
            self._changed.notify_all()

    def _entered(self) -> _LastingCall:
        call = self._call
        if call is None or call.over or call.limit is None:
            raise Aborted(f"the framework's call of {self._member} has ended: {self._given_up or 'it took too long'}")
        return call

    def require_call(self) -> None:
        """Check that the framework's call lasts.

        Raises:
            Aborted: It does not.
        """
        with self._changed:
            self._entered()

    def install(self, timeout: float) -> None:
        """Load the staged weights on the framework's thread.

        Raises:
            Aborted: The call ended.
            DeadlineExceeded: It took longer than ``timeout`` seconds.
            Exception: The loading raised it.
        """
        with self._changed:
            call = self._entered()
            call.work, call.worked = self._load, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: call.work is None or call.over, timeout)
            if call.worked is not None:
                raise call.worked
            self._entered()
            if call.work is not None:
                raise DeadlineExceeded(f"{self._member} did not load the weights within {timeout:.3g} s")

    def flush(self, timeout: float) -> bool:
        """Do nothing: the framework drops its engine's caches."""
        return True

    def label(self, version: str, timeout: float) -> None:
        """Do nothing: the framework labels its engine."""

    def resume(self, timeout: float) -> None:
        """End the call: the version is installed and verified.

        Raises:
            Aborted: It ended before.
        """
        with self._changed:
            self._entered().over = True
            self._changed.notify_all()
