"""The coordinator's word on replicas and versions, pushed: its events, and a look at the status where an event asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import httpx
import msgspec

from weightsync.config import ClientSettings
from weightsync.coordinator.events import Event, Joined, Left, ReplicaEnded, ReplicaPhase, RoundEnded
from weightsync.coordinator.status import Status
from weightsync.errors import AuthenticationError, CoordinatorUnreachable, ProtocolError
from weightsync.protocol.endpoint import reason, tls_context, unreachable
from weightsync.protocol.messages import decoding
from weightsync.server.presenting import presenting

__all__ = ["Watch", "coordinator_http"]

_log = logging.getLogger(__name__)
_MISSED = 3  # heartbeats without a byte
_TRUSTED_SECONDS = 2.0
_FIRST_AGAIN = 0.05
_MOST_AGAIN = 5.0
_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_STATUS: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


def coordinator_http(settings: ClientSettings) -> httpx.AsyncClient:
    """Connections to the coordinator, which prove its token."""
    context = tls_context(settings)
    return httpx.AsyncClient(
        base_url=settings.coordinator.url,
        auth=presenting(settings, _TRUSTED_SECONDS),
        timeout=settings.timeouts.connect,
        verify=True if context is None else context,
        trust_env=False,
    )


class Watch:
    """Hands every change on until it is closed. A lost connection is made again, and what was missed is looked up once.

    ``on_status`` gets the whole status after each event that may have changed it, ``on_pausing`` a replica's name as soon as it is
    being paused or is in quarantine. While no coordinator answers, nothing is reported, and the last report stays true as far as
    anybody knows. A wrong token ends it: :attr:`ended` then raises :class:`~weightsync.errors.AuthenticationError`.
    """

    def __init__(self, settings: ClientSettings, on_status: Callable[[Status], None], on_pausing: Callable[[str], None]) -> None:
        self._settings, self._on_status, self._on_pausing = settings, on_status, on_pausing
        self._stale = asyncio.Event()
        self._again = _FIRST_AGAIN
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
                await asyncio.sleep(self._again)
                self._again = min(self._again * 2, _MOST_AGAIN)

    async def _once(self, http: httpx.AsyncClient) -> None:
        async with self._stream(http) as lines:
            self._stale.set()  # after the stream is open: nothing falls in between
            both = [asyncio.create_task(self._read(lines)), asyncio.create_task(self._look(http))]
            try:
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _read(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            if line.startswith("data: "):
                self._heard(line[6:])

    @asynccontextmanager
    async def _stream(self, http: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
        timeout = httpx.Timeout(self._settings.timeouts.connect, read=_MISSED * self._settings.timeouts.heartbeat)
        async with http.stream("GET", "/v1/events", timeout=timeout) as answer:
            self._check(answer)
            yield answer.aiter_lines()

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise AuthenticationError(f"{self._settings.coordinator}: the token is missing or wrong")
        if not answer.is_success:
            raise ProtocolError(f"{self._settings.coordinator} answered HTTP {answer.status_code}")

    def _heard(self, data: str) -> None:
        with decoding(f"{self._settings.coordinator} sent an invalid event"):
            event = _EVENT.decode(data)
        match event:
            case ReplicaPhase(replica=name, phase="pause" | "quarantine"):
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
            answer = await http.get("/v1/status")
            self._check(answer)
            with decoding(f"{self._settings.coordinator} answered something else than a status"):
                status = _STATUS.decode(answer.content)
            self._again = _FIRST_AGAIN
            self._on_status(status)
            if not self._first.done():
                self._first.set_result(None)
