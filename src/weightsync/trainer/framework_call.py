"""A framework's call of its engine, and the publication that it lets in: if one fails, the other ends."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from weightsync.errors import WeightSyncError, readable
from weightsync.outcome import Latch
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import EndCall

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
                    self._tell(f"the publication is over{failed}", refuse=False)

    def failed(self, reason: str, timeout: float) -> None:
        """End the publication: the call has failed. ``timeout`` bounds the wait for its beginning."""
        self.known.wait(timeout)
        with self._lock:
            if not self._over and self.link is not None:
                self.refused = True
                self._tell(reason, refuse=True)

    def _tell(self, reason: str, *, refuse: bool) -> None:
        if self.link is not None:
            with suppress(WeightSyncError):
                self.link.call(EndCall(self.number, readable(reason, _MESSAGE_CHARS), refuse), _TELLING_SECONDS)


_call: ContextVar[FrameworkCall | None] = ContextVar("framework_call", default=None)


def note_trainer(link: CoordinatorConnection | None) -> None:
    """Tell the call for which this thread publishes, if there is one, by whom."""
    call = _call.get()
    if call is not None:
        call.link = link
        call.known.set()
