"""Follows replicas and versions by server-sent events, and reads the status when an event requires it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

import httpx

from weightsync.config import ClientSettings
from weightsync.coordinator.events import Event, Joined, Left, ReplicaEnded, ReplicaPhase, RoundEnded
from weightsync.coordinator.status import Status
from weightsync.errors import CoordinatorUnreachable, ProtocolError
from weightsync.protocol.endpoint import reason, unreachable
from weightsync.server.http_client import Backoff, check_status, coordinator_http, decoded, event_data, event_in, event_timeout

_log = logging.getLogger(__name__)


class Watch:
    """Hands every change on until it is closed. A lost connection is made again, and what was missed is looked up once.

    ``on_status`` gets the whole status after each event that may have changed it, ``on_pausing`` a replica's name as soon as it is
    about to be paused, is being paused, or is in quarantine. If there is no place among the readers of events, it gets the status
    at each attempt to get one. Without a coordinator nothing is reported, and the last report stays true as far as is known. A
    wrong token ends it;
    :attr:`ended` then raises :class:`~weightsync.errors.AuthenticationError`.
    """

    def __init__(self, settings: ClientSettings, on_status: Callable[[Status], None], on_pausing: Callable[[str], None]) -> None:
        self._settings, self._on_status, self._on_pausing = settings, on_status, on_pausing
        self._stale = asyncio.Event()
        self._again = Backoff(most=5.0)
        self._trouble = ""
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Task[None] = asyncio.create_task(self._run(), name="watch the coordinator")

    async def started(self, seconds: float) -> None:
        """Return when the first status was handed on. Raises ``CoordinatorUnreachable``, and what ended it."""
        await asyncio.wait([self._first, self.ended], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()
        if not self._first.done():
            raise CoordinatorUnreachable(unreachable(self._settings, self._trouble or f"no status within {seconds:g} s"))

    async def aclose(self) -> None:
        """Stop. Safe twice."""
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)
        self._first.cancel()

    async def _run(self) -> None:
        async with coordinator_http(self._settings) as http:
            while True:
                try:
                    await self._once(http)
                except (httpx.HTTPError, ProtocolError) as error:
                    self._trouble = reason(error)
                    _log.info("the events of %s broke off: %s", self._settings.coordinator, self._trouble)
                # Not a poll: this is a connection being made again, less and less often, while there is none.
                await self._again.rest()

    async def _once(self, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/v1/events", timeout=event_timeout(self._settings)) as answer:
            if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:  # others hold all places: see how things are at least
                await self._report(http)
            check_status(answer, self._settings)
            self._stale.set()  # after the stream is open: nothing falls in between
            both = [asyncio.create_task(self._read(answer)), asyncio.create_task(self._look(http))]
            try:
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _read(self, answer: httpx.Response) -> None:
        async for data in event_data(answer, self._settings.coordinator):
            self._heard(event_in(data, self._settings))

    def _heard(self, event: Event) -> None:
        match event:
            case ReplicaPhase(replica=name, phase="drain" | "pause" | "quarantine"):
                self._on_pausing(name)
                self._stale.set()  # a look that is under way may be older than this
            case Left(member=member):
                self._on_pausing(member.rpartition("/")[0])
                self._stale.set()
            case Joined() | ReplicaEnded() | RoundEnded():
                self._stale.set()
            case _:
                pass

    async def _look(self, http: httpx.AsyncClient) -> None:
        """Fetch the status after events that changed it: one look at a time, however many events there were."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            await self._report(http)
            self._again.reset()

    async def _report(self, http: httpx.AsyncClient) -> None:
        """Fetch the status once and hand it on."""
        answer = await http.get("/v1/status")
        check_status(answer, self._settings)
        self._on_status(decoded(answer, Status, self._settings))
        if not self._first.done():
            self._first.set_result(None)
