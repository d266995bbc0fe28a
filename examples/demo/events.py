"""The coordinator's events and status, as its HTTP interface tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import msgspec

from weightsync.config import ClientSettings
from weightsync.coordinator.events import Event
from weightsync.coordinator.status import Status
from weightsync.errors import AuthenticationError, CoordinatorUnreachable
from weightsync.server.presenting import presenting

__all__ = ["follow", "status"]

_SECONDS = 30.0  # the stream shows a sign of life more often than that
_OK = 200
_UNAUTHORIZED = 401


def _client(settings: ClientSettings) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=settings.coordinator.url, auth=presenting(settings), timeout=_SECONDS, trust_env=False)


def _check(settings: ClientSettings, code: int) -> None:
    if code == _UNAUTHORIZED:
        raise AuthenticationError(f"the coordinator at {settings.coordinator} wants another token: set WEIGHTSYNC_TOKEN")
    if code != _OK:
        raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} answered with HTTP {code}")


async def follow(settings: ClientSettings, heard: Callable[[Event], None], listening: asyncio.Event) -> None:
    """Hand on events until cancelled; ``listening`` is set once none can be missed any more.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable` when the stream cannot be had or ends,
    :class:`~weightsync.errors.AuthenticationError` for a wrong token.
    """
    try:
        async with _client(settings) as client, client.stream("GET", "/v1/events") as answer:
            _check(settings, answer.status_code)
            async for line in answer.aiter_lines():
                listening.set()
                if line.startswith("data:"):
                    heard(msgspec.json.decode(line.removeprefix("data:"), type=Event))
    except httpx.HTTPError as error:
        raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} is gone: {error!r}") from None
    raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} ended its events")


async def status(settings: ClientSettings) -> Status:
    """Who serves which version now. Raises as :func:`follow`."""
    try:
        async with _client(settings) as client:
            answer = await client.get("/v1/status")
    except httpx.HTTPError as error:
        raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} does not answer: {error!r}") from None
    _check(settings, answer.status_code)
    return msgspec.json.decode(answer.content, type=Status)
