"""Holds the feed of events to keeping nothing for subscribers that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from weightsync.coordinator.events import Event, Feed


async def test_a_subscriber_that_goes_before_its_first_event_is_forgotten() -> None:
    """A reader of ``/v1/events`` that hangs up at once: each left a queue of events for the coordinator's life."""
    feed = Feed()
    for _ in range(3):
        closed = cast("AsyncGenerator[Event, None]", feed.subscribe())
        await closed.aclose()
        cancelled = cast("AsyncGenerator[Event, None]", feed.subscribe())
        waiting = asyncio.ensure_future(anext(cancelled))
        waiting.cancel()
        await asyncio.wait([waiting])
        await cancelled.aclose()
        feed.subscribe()
    del closed, cancelled, waiting
    assert len(feed._subscribers) == 0
