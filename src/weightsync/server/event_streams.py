"""Server-sent events: streams of the coordinator's service that last."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from http import HTTPStatus
from typing import Any, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

T = TypeVar("T")


class EventStreams:
    """Streams to at most ``most`` readers at one time. A reader gets a comment every ``heartbeat`` seconds without an event.

    When all places are taken, a reader at an address with fewer streams takes that of the oldest reader at the address with most.
    """

    def __init__(self, most: int, heartbeat: float) -> None:
        self._most, self._heartbeat = most, heartbeat
        self._readers: dict[asyncio.Future[None], str] = {}
        """What ends each stream, and the address of its reader, oldest first."""

    def respond(self, request: Request, subscribe: Callable[[], AsyncIterator[T]], encode: Callable[[T], bytes]) -> Response:
        """Answer ``request`` by a stream of what ``subscribe`` iterates over, each as the lines that ``encode`` makes of it.

        Raises:
            HTTPException: There are too many readers.
        """
        host = request.client.host if request.client is not None else ""
        if len(self._readers) >= self._most:
            self._make_room(host)
        stream = self._stream(host, subscribe, encode)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def _make_room(self, host: str) -> None:
        readers = Counter(self._readers.values())
        [(crowded, most)] = readers.most_common(1)
        if most <= readers[host] + 1:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{len(self._readers)} readers of events already; try again later")
        oldest = next(ended for ended, where in self._readers.items() if where == crowded)
        del self._readers[oldest]
        oldest.set_result(None)

    async def _stream(
        self, host: str, subscribe: Callable[[], AsyncIterator[T]], encode: Callable[[T], bytes]
    ) -> AsyncIterator[bytes]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers[ended] = host
        events = cast("AsyncGenerator[T, None]", subscribe())
        coming: asyncio.Future[T] | None = None
        try:
            yield b": events\n\n"
            while True:
                coming = asyncio.ensure_future(anext(events))
                either: list[asyncio.Future[Any]] = [coming, ended]
                while not (await asyncio.wait(either, timeout=self._heartbeat, return_when=asyncio.FIRST_COMPLETED))[0]:
                    yield b": still here\n\n"
                if ended.done():
                    return
                yield encode(coming.result())
        except StopAsyncIteration:
            return
        finally:
            self._readers.pop(ended, None)
            if coming is not None and not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
            await events.aclose()
