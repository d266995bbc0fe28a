"""The coordinator's events and status, as its HTTP interface tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import msgspec

from weightsync.config import ClientSettings
from weightsync.coordinator.events import Event
from weightsync.coordinator.status import Status
from weightsync.errors import CoordinatorUnreachable
from weightsync.server.http_client import check_status, coordinator_http, decoded, event_data, event_timeout

__all__ = ["follow", "status"]


async def follow(settings: ClientSettings, heard: Callable[[Event], None], listening: asyncio.Event) -> None:
    """Hand on events until cancelled; ``listening`` is set once none can be missed any more.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable` when the stream cannot be had or ends,
    :class:`~weightsync.errors.AuthenticationError` for a wrong token.
    """
    try:
        async with (
            coordinator_http(settings) as client,
            client.stream("GET", "/v1/events", timeout=event_timeout(settings)) as answer,
        ):
            check_status(answer, settings)
            listening.set()
            async for data in event_data(answer, settings.coordinator):
                heard(msgspec.json.decode(data, type=Event))
    except httpx.HTTPError as error:
        raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} is gone: {error!r}") from None
    raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} ended its events")


async def status(settings: ClientSettings) -> Status:
    """Who serves which version now. Raises as :func:`follow`."""
    try:
        async with coordinator_http(settings) as client:
            answer = await client.get("/v1/status")
    except httpx.HTTPError as error:
        raise CoordinatorUnreachable(f"the coordinator at {settings.coordinator} does not answer: {error!r}") from None
    check_status(answer, settings)
    return decoded(answer, Status, settings)
