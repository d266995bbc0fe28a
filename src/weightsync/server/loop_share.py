"""HTTP requests take a bounded share of the event loop's time, so that those of one client do not delay rounds.

Answers about the whole state, which take long to make, are kept for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from weightsync.server.allowance import RateAllowance

_LONG = 0.01
_KEPT = 10.0


class LoopShare:
    """Delays requests while those before them have used up their share of the event loop's time. They are served in order.

    Args:
        app: Answers the requests. Its time is measured, without that in which it waits.
        share: Part of the loop's time that requests may take in the long run.
        ahead: Seconds of that share that requests may use at once.
        uncounted: Paths that are never delayed.
    """

    def __init__(self, app: ASGIApp, share: float, ahead: float, uncounted: frozenset[str]) -> None:
        self._app, self._uncounted = app, uncounted
        self._order = asyncio.Lock()
        self._allowance = RateAllowance(share, share * ahead)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request when there is time for it."""
        if scope["type"] != "http" or scope["path"] in self._uncounted:
            await self._app(scope, receive, send)
            return
        async with self._order:
            await asyncio.sleep(self._allowance.early())
        await _Metered(self._app(scope, receive, send).__await__(), self._allowance.take)


class _Metered:
    """Awaits ``work`` and tells ``charge`` the processor time of each of its steps, in which the event loop does nothing else."""

    def __init__(self, work: Generator[Any, Any, None], charge: Callable[[float], object]) -> None:
        self._work, self._charge = work, charge

    def __await__(self) -> Generator[Any, None, None]:
        error: BaseException | None = None
        while True:
            began = time.thread_time()  # not the clock: on a busy machine that counts what others do
            try:
                waiting = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration:
                return
            finally:
                self._charge(time.thread_time() - began)
            error = None
            try:
                yield waiting
            except BaseException as raised:  # noqa: BLE001 - thrown into the work, which decides
                error = raised


class Snapshot:
    """What ``make`` returns. If that took long, the same is given again for ten times as long, while ``of()`` is the same object.

    So all that ask take a tenth of the loop's time at most. With fewer than a thousand agents each gets a new answer.
    """

    def __init__(self, make: Callable[[], bytes], of: Callable[[], object] = lambda: None) -> None:
        self._make, self._of = make, of
        self._made, self._made_of = b"", of()
        self._until = 0.0

    def get(self) -> bytes:
        """The answer, at most some hundreds of milliseconds old."""
        now = time.monotonic()
        if now < self._until and self._of() is self._made_of:
            return self._made
        began = time.thread_time()  # not the clock: on a busy machine that counts what others do
        self._made_of, made = self._of(), self._make()
        took = time.thread_time() - began
        self._made, self._until = (made, time.monotonic() + _KEPT * took) if took > _LONG else (b"", 0.0)
        return made
