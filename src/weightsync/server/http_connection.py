"""HTTP/1.1 on one accepted connection: h11 parses requests, an ASGI application answers them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from asyncio import StreamReader, StreamWriter
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from weightsync.config import ServerSettings
from weightsync.server.websocket_connection import WebSocketConnection

_log = logging.getLogger(__name__)

TRANSPORT = "weightsync.transport"
"""The key of a request's scope under which its connection's transport is."""

_HEAD_BYTES = 16 << 10  # of a request, before it is known who makes it
_HEAD_LINES = 128  # each takes the event loop some microseconds
_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNK = 64 << 10
_KEEP_ALIVE_SECONDS = 5.0  # from an answer to the end of the next request's head
_STALLED_SECONDS = 30.0  # in which a peer takes 64 KiB of an answer
_BODY_SECONDS, _BODY_BYTES_PER_SECOND = 30.0, 64 << 10  # a body takes at most so long, and a second more for so many bytes
_DROPPED_BYTES, _DROPPED_EVENTS = 1 << 20, 1024  # of a body that the application does not want; more of it ends the connection


class HttpConnection:
    """The requests of one connection, one at a time, until one of them upgrades it to a WebSocket.

    A peer that sends no HTTP gets an answer of 400 and leaves nothing in the log. A peer that sends a body or takes an answer too
    slowly is cut off: it would hold one of the requests that may be in progress. The time until the first request is not bounded
    here: :class:`~weightsync.server.connections.Connections` closes connections that do not authenticate in time.

    What a peer sends is bounded in bytes and in the events that h11 makes of them. Each request, and each piece of a body, leaves a
    turn of the event loop to others. Only a POST has a body, and it says how long it is: chunks can be of one byte.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, reader: StreamReader, writer: StreamWriter) -> None:
        self._app, self._settings = app, settings
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, _HEAD_BYTES)
        self._head_only = self._started = self._gone = False
        self._complete = asyncio.Event()
        self._complete.set()
        self._closing = False
        self._body_until = 0.0

    def close(self) -> None:
        """Close when the request under way is answered, at once if there is none."""
        self._closing = True
        if self._complete.is_set():
            self._writer.close()

    async def serve(self) -> None:
        """Answer requests until the connection ends. The caller closes the writer."""
        try:
            request = await self._next_head()
            while isinstance(request, h11.Request):
                refusal = _refusal(request)
                if refusal is not None:
                    await self._refuse(refusal)
                    return
                scope = self._scope(request)
                if _upgrades(request):
                    early = self._http.trailing_data[0]
                    websocket = WebSocketConnection(self._app, self._settings, self._reader, self._writer, early)
                    await websocket.serve({**scope, "type": "websocket"}, _head(request))
                    return
                if not await self._answer(scope):
                    return
                self._http.start_next_cycle()
                async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                    request = await self._next_head()
        except TimeoutError:
            return
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)

    async def _answer(self, scope: Scope) -> bool:
        """Run the application on one request. Returns whether the connection can take another one."""
        self._head_only, self._started = scope["method"] == "HEAD", False
        self._body_until = asyncio.get_running_loop().time() + _BODY_SECONDS
        self._complete.clear()
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - the application has answered with a problem, or does not matter any more
            if not self._gone:
                _log.error("%s %r failed unexpectedly", scope["method"], scope["path"], exc_info=error)
        finally:
            if self._started and not self._complete.is_set():
                self._gone = True
            elif not self._started and not self._gone:
                await self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
            self._complete.set()
        if self._gone or self._closing:
            return False
        if self._http.our_state is h11.DONE and self._http.their_state is h11.SEND_BODY:
            await self._drop_body()
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _drop_body(self) -> None:
        """Read and drop a small body that was not wanted, so that the peer is not cut off before it has read the answer."""
        left = _DROPPED_BYTES
        with contextlib.suppress(h11.RemoteProtocolError):
            async with asyncio.timeout(self._settings.limits.hello_seconds):
                for _ in range(_DROPPED_EVENTS):
                    event = await self._next_event()
                    left -= len(event.data) if isinstance(event, h11.Data) else left
                    if left <= 0:
                        return

    async def _next_head(self) -> h11.Event | type[h11.PAUSED]:
        """Return the next request, whose head is measured before it is parsed, or the end of the connection."""
        await asyncio.sleep(0)  # requests that came together are answered in as many turns
        while True:
            received, _ = self._http.trailing_data
            end = _HEAD_END.search(received)
            nbytes = end.start() if end else len(received)
            if nbytes > _HEAD_BYTES or received.count(b"\n", 0, nbytes) >= _HEAD_LINES:
                raise h11.RemoteProtocolError("the head is too long", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            if (event := self._http.next_event()) is not h11.NEED_DATA:
                return cast("h11.Event | type[h11.PAUSED]", event)
            self._http.receive_data(await self._read())

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))
            self._http.receive_data(await self._read())
        return cast("h11.Event | type[h11.PAUSED]", event)

    async def _read(self) -> bytes:
        await asyncio.sleep(0)  # what is there already is read without waiting
        try:
            return await self._reader.read(_CHUNK)
        except OSError:
            return b""

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)

    async def _refuse(self, status: int) -> None:
        """Answer with a bare status, if an answer can still be sent, and end the connection."""
        with contextlib.suppress(h11.LocalProtocolError, OSError):
            body = HTTPStatus(status).phrase.encode()
            headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self._write(event)
            await self._writer.drain()

    def _scope(self, request: h11.Request) -> dict[str, Any]:
        raw_path, _, query = request.target.partition(b"?")
        transport = self._writer.transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "scheme": self._settings.scheme,
            "method": request.method.decode("ascii"),
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
            TRANSPORT: transport,
        }

    async def _receive(self) -> Message:
        """Return the next part of the request's body; after its end wait until the peer is gone or the answer is complete."""
        if self._http.their_state is h11.SEND_BODY and not self._complete.is_set():
            try:
                async with asyncio.timeout_at(self._body_until):
                    event = await self._next_event()
            except (h11.RemoteProtocolError, TimeoutError):
                self._gone = True
                return {"type": "http.disconnect"}
            if isinstance(event, h11.Data):
                self._body_until += len(event.data) / _BODY_BYTES_PER_SECOND
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            return {"type": "http.request", "body": b"", "more_body": False}
        if not self._complete.is_set() and not self._http.trailing_data[0]:
            data = await self._read()
            self._http.receive_data(data)  # the peer's next request, of which no more is read before this one is answered
            self._gone = self._gone or not data
        if not self._gone:
            await self._complete.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Send one event of the application. A peer that is gone is no error: the application learns it from ``receive``."""
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._started = True
            headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())]
            if self._closing:
                headers.append((b"connection", b"close"))
            self._write(h11.Response(status_code=message["status"], headers=headers))
            return
        body = b"" if self._head_only else message.get("body", b"")
        for start in range(0, len(body), _CHUNK):
            self._write(h11.Data(data=body[start : start + _CHUNK]))
            if not await self._drained():
                return
        if not message.get("more_body", False):
            self._write(h11.EndOfMessage())
            self._complete.set()
            await self._drained()

    async def _drained(self) -> bool:
        """Wait while the peer does not take what was written. Returns False for a peer that is gone or takes too long."""
        try:
            async with asyncio.timeout(_STALLED_SECONDS):
                await self._writer.drain()
        except (OSError, TimeoutError):
            self._gone = True
            self._writer.transport.abort()
        return not self._gone


def _address(where: Any) -> tuple[str, int] | None:  # noqa: ANN401 - what the socket's family calls an address
    return (str(where[0]), int(where[1])) if isinstance(where, tuple) else None


def _refusal(request: h11.Request) -> HTTPStatus | None:
    """Return why a request is not taken, by the body that its head announces."""
    headers = dict(request.headers)
    length = headers.get(b"content-length")
    if b"transfer-encoding" in headers:
        return HTTPStatus.LENGTH_REQUIRED if length is None else HTTPStatus.BAD_REQUEST
    return HTTPStatus.BAD_REQUEST if int(length or 0) and request.method != b"POST" else None


def _upgrades(request: h11.Request) -> bool:
    headers = dict(request.headers)
    tokens = [token.strip().lower() for token in headers.get(b"connection", b"").split(b",")]
    return request.method == b"GET" and b"upgrade" in tokens and headers.get(b"upgrade", b"").lower() == b"websocket"


def _head(request: h11.Request) -> bytes:
    """The head of a request as bytes again, for the WebSocket library's own parser."""
    lines = [b"GET " + request.target + b" HTTP/1.1", *(name + b": " + value for name, value in request.headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"
