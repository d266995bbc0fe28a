"""Calls by which engine ranks drop versions of adapters: one at a time for each rank, however many versions are retired at once.

A rank's agent ends its connection if it gets too many calls at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.protocol.lora_messages import DropLora
from weightsync.protocol.messages import Done

if TYPE_CHECKING:
    from weightsync.coordinator.rank_handle import RankHandle

_log = logging.getLogger(__name__)
_DROP_SECONDS = 300.0  # for which a call to drop versions may wait in a rank


class DropQueue:
    """Versions that one engine rank is to drop, by name. ``link`` is its handle."""

    def __init__(self, link: RankHandle[Any]) -> None:
        self._link = link
        self._waiting: dict[str, tuple[set[int], asyncio.Future[None]]] = {}
        self._busy = False

    def put(self, name: str, numbers: Iterable[int]) -> asyncio.Future[None]:
        """Let the rank drop these versions. The future ends when it has, or could not. Nothing is withdrawn."""
        if name not in self._waiting:
            self._waiting[name] = set(), asyncio.get_running_loop().create_future()
        known, outcome = self._waiting[name]
        known.update(numbers)
        if not self._busy:
            self._next()
        return outcome

    def waiting(self, name: str) -> list[asyncio.Future[None]]:
        """Whatever has not been sent to the rank yet and drops versions of ``name``: a later call must not overtake it."""
        return [self._waiting[name][1]] if name in self._waiting else []

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            name = next(iter(self._waiting))
            numbers, outcome = self._waiting.pop(name)
            call = self._link.ask(DropLora(name, tuple(sorted(numbers))), Done, _DROP_SECONDS)
            self._link.start(call).add_done_callback(partial(self._ended, name, outcome))

    def _ended(self, name: str, outcome: asyncio.Future[None], asked: asyncio.Future[Done]) -> None:
        error = Aborted("the call was cancelled") if asked.cancelled() else asked.exception()
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
            outcome.exception()  # mark as retrieved: perhaps no caller waits for it
            _log.warning("%s could not be told to drop versions of %s: %s", self._link.member, name, error)
        self._next()


async def drop(engines: Mapping[str, RankHandle[Any]], name: str, numbers: Collection[int], seconds: float) -> list[str]:
    """Let every rank drop these versions. Returns the errors of those that have not within ``seconds``.

    The call is not withdrawn then: a rank that is stopped or busy drops them later, and one that reconnects says what it has.
    """
    asked = {member: link.drops.put(name, numbers) for member, link in engines.items()}
    if asked:
        await asyncio.wait(asked.values(), timeout=seconds)
    errors: list[str] = []
    for member, outcome in asked.items():
        error = outcome.exception() if outcome.done() else DeadlineExceeded(f"no answer within {seconds:g} s")
        if error is not None:
            errors.append(f"{member} could not be told to drop versions of {name}: {error}")
    return errors
