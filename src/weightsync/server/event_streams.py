"""Server-sent events: streams of the coordinator's service that last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from http import HTTPStatus
from typing import TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

__all__ = ["EventStreams"]

T = TypeVar("T")


class EventStreams:
    """Streams to at most ``most`` readers at one time. A reader gets a comment every ``heartbeat`` seconds without an event."""

    def __init__(self, most: int, heartbeat: float) -> None:
        self._most, self._heartbeat = most, heartbeat
        self._running = 0

    def respond(self, subscribe: Callable[[], AsyncIterator[T]], encode: Callable[[T], bytes]) -> Response:
        """Stream what ``subscribe`` iterates over, each as the lines that ``encode`` makes of it.

        Raises:
            HTTPException: There are too many readers.
        """
        if self._running >= self._most:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._running} readers of events already; try again later")
        stream = self._stream(subscribe, encode)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _stream(self, subscribe: Callable[[], AsyncIterator[T]], encode: Callable[[T], bytes]) -> AsyncIterator[bytes]:
        self._running += 1
        events = cast("AsyncGenerator[T, None]", subscribe())
        coming: asyncio.Future[T] | None = None
        try:
            yield b": events\n\n"
            while True:
                coming = asyncio.ensure_future(anext(events))
                while not (await asyncio.wait([coming], timeout=self._heartbeat))[0]:
                    yield b": still here\n\n"
                yield encode(coming.result())
        except StopAsyncIteration:
            return
        finally:
            self._running -= 1
            if coming is not None and not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
            await events.aclose()
