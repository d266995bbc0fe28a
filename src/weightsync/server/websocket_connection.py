"""A WebSocket on one connection, for an ASGI application: websockets' sans-I/O protocol over asyncio's streams."""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio import StreamReader, StreamWriter, TimerHandle
from collections import deque
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Scope
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from weightsync.config import ServerSettings
from weightsync.server.allowance import RateAllowance

_log = logging.getLogger(__name__)

# At DEBUG the WebSocket library logs headers and frames: the bearer token, and data keys.
_wire_log = logging.getLogger("weightsync.websocket.server")
_wire_log.setLevel(logging.ERROR)

# A piece of what a peer sends is parsed in one go, at 10 us for a frame of 6 bytes; pieces grow within a frame that is large.
_PIECE, _LARGEST_PIECE, _PIECES = 1 << 10, 16 << 10, 8
_CLOSING_BYTES, _CLOSING_FRAMES = 1 << 20, 256  # of a peer that has yet to answer a close
_FRAMES = 4096.0  # frames that are no whole message (fragments, pings, pongs) that one peer may send at once
_FRAMES_PER_SECOND = 100.0  # and in the long run; an agent sends a few a minute, and never a fragment
_MESSAGES = 256.0  # whole messages that one peer may send at once
_MESSAGES_PER_SECOND = 500.0  # and in the long run; beyond that they wait, and with them the peer


class WebSocketConnection:
    """One WebSocket, from its upgrade request to its end.

    The application's own ``receive`` reads from the connection, so a peer whose messages are not consumed is not read from.
    Answers to pings are written before anything more is read, so neither is a peer that does not read. A peer that misses a pong
    is cut off.

    Frames that came with the upgrade request (``early``) are parsed after it was accepted. The library would answer them ahead of
    the response, or end the connection that the response must go over.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, reader: StreamReader, writer: StreamWriter, early: bytes = b""
    ) -> None:
        self._app, self._settings = app, settings
        self._reader, self._writer, self._early = reader, writer, early
        self._protocol = ServerProtocol(max_size=settings.limits.frame_bytes, logger=_wire_log)
        self._events: deque[Any] = deque()
        self._unparsed = 0  # bytes since the last whole frame
        self._parts: list[bytes] = []
        self._text = False
        self._response: Response | None = None
        self._refusal: Message | None = None
        self._connect_sent = self._ended = False
        self._frames = RateAllowance(_FRAMES_PER_SECOND, _FRAMES)
        self._messages = RateAllowance(_MESSAGES_PER_SECOND, _MESSAGES)
        self._ping: bytes | None = None
        self._timer: TimerHandle | None = None

    async def serve(self, scope: Scope, head: bytes) -> None:
        """Do the handshake of the request in ``head`` and run the application. The caller closes the writer."""
        self._take(head)
        request = self._events.popleft() if self._events else None
        if not isinstance(request, Request):
            return  # the library's parser is stricter than h11
        response = self._protocol.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._protocol.send_response(response)
            await self._flush()
            return
        del response.headers["Date"]
        self._response = response
        offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol"))
        scope["subprotocols"] = [name.strip() for name in offered.split(",") if name.strip()]
        scope["extensions"] = {"websocket.http.response": {}}
        code = CloseCode.NORMAL_CLOSURE
        try:
            await self._app(scope, self._receive, self._send)
        except OSError:
            pass  # the peer is gone
        except Exception as error:  # noqa: BLE001 - the peer learns that the connection ends by an error
            _log.error("the WebSocket %s failed unexpectedly", scope["path"], exc_info=error)
            code = CloseCode.INTERNAL_ERROR
        try:
            await self._finish(code)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _finish(self, code: int) -> None:
        """Send what ends the connection, unless it was sent, and give the peer a while to answer it."""
        if self._writer.transport.is_closing():
            return
        if self._response is not None:
            self._protocol.send_response(self._protocol.reject(HTTPStatus.INTERNAL_SERVER_ERROR, ""))
        elif self._protocol.state is State.OPEN:
            self._protocol.send_close(code)
        try:
            async with asyncio.timeout(self._settings.limits.hello_seconds):
                await self._flush()
                nbytes, frames = _CLOSING_BYTES, _CLOSING_FRAMES
                while self._protocol.state is State.CLOSING and self._protocol.close_rcvd is None:
                    data = await self._read()
                    self._take(data)
                    nbytes, frames = nbytes - len(data), frames - len(self._events)
                    self._events.clear()
                    if nbytes < 0 or frames < 0:
                        self._writer.transport.abort()
                        return
                await self._flush()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    async def _read(self) -> bytes:
        """Return a piece of what the peer sent, after a turn of the event loop for others."""
        await asyncio.sleep(0)
        size = min(max(_PIECE, self._unparsed // _PIECES), _LARGEST_PIECE)
        if self._early:
            data, self._early = self._early[:size], self._early[size:]
            return data
        return await self._reader.read(size)

    def _take(self, data: bytes) -> None:
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        events = self._protocol.events_received()
        self._unparsed = 0 if events else self._unparsed + len(data)
        self._events.extend(events)

    async def _flush(self) -> None:
        """Write what the protocol has to send, and wait while the peer does not read."""
        pieces = self._protocol.data_to_send()
        for piece in pieces:
            if piece:
                self._writer.write(piece)
            else:  # both sides have sent a close frame
                self._writer.close()
        if pieces:
            await self._writer.drain()

    async def _receive(self) -> Message:
        if not self._connect_sent:
            self._connect_sent = True
            return {"type": "websocket.connect"}
        while not self._ended:
            while self._events:
                message = self._message(self._events.popleft())
                if message is not None:
                    early = self._messages.take()
                    if early:  # the agent can have the coordinator do no more than that, whatever its messages are
                        await asyncio.sleep(early)
                    return message
            try:
                data = await self._read()
                self._take(data)
                await self._flush()
            except OSError:
                data = b""
            if not data or self._protocol.parser_exc is not None:
                self._ended = self._ended or not self._events
        close = self._protocol.close_rcvd or self._protocol.close_sent
        if close is None:
            return {"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE}
        return {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}

    def _message(self, event: object) -> Message | None:
        """The application's event for one frame: a whole message, the peer's close, or nothing."""
        if not isinstance(event, Frame):
            return None
        if event.opcode is Opcode.CLOSE:
            self._ended = True
            return None
        if event.opcode in (Opcode.PING, Opcode.PONG, Opcode.CONT) and not self._may_send_frame():
            return None
        if event.opcode is Opcode.PONG and bytes(event.data) == self._ping:
            self._ping = None
        if event.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) or self._closed_here():
            return None
        if event.opcode is not Opcode.CONT:
            self._text = event.opcode is Opcode.TEXT
        self._parts.append(bytes(event.data))
        if not event.fin:
            return None
        data, self._parts = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts), []
        content = {"text": data.decode("utf-8", "replace")} if self._text else {"bytes": data}
        return {"type": "websocket.receive", **content}

    def _closed_here(self) -> bool:
        """Whether this end closed, or has to. What arrived together with the peer's close was sent before it, and counts."""
        return self._protocol.parser_exc is not None or (
            self._protocol.state is not State.OPEN and self._protocol.close_rcvd is None
        )

    def _may_send_frame(self) -> bool:
        """Count one frame that is no whole message. Returns ``False`` for a peer that sent too many, which is cut off."""
        if not self._frames.take():
            return True
        self._ended = True
        self._events.clear()
        self._parts = []
        host = (self._writer.get_extra_info("peername") or ("an unknown address",))[0]
        _log.warning("dropped the agent at %s: it sent thousands of fragments, pings or pongs", host)
        self._writer.transport.abort()
        return False

    async def _send(self, message: Message) -> None:
        """Send one event of the application. Raises :class:`OSError` if the connection is closed."""
        kind = message["type"]
        if self._response is not None:
            if kind == "websocket.accept":
                self._accept(self._response, message)
            elif kind == "websocket.http.response.start":
                self._refusal = message
                return
            else:
                start = self._refusal or {"status": HTTPStatus.FORBIDDEN}
                headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start.get("headers", ())]
                status = HTTPStatus(start["status"])
                body = message.get("body", b"") if self._refusal else b""
                self._protocol.send_response(Response(status, status.phrase, Headers([*headers, ("Connection", "close")]), body))
            self._response = None
        elif self._protocol.state is not State.OPEN:
            raise ConnectionResetError("the WebSocket is closed")
        elif kind == "websocket.close":
            self._protocol.send_close(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
        elif message.get("bytes") is not None:
            self._protocol.send_binary(message["bytes"])
        else:
            self._protocol.send_text(message["text"].encode())
        await self._flush()

    def _accept(self, response: Response, message: Message) -> None:
        for name, value in message.get("headers", ()):
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
        if message.get("subprotocol"):
            response.headers["Sec-WebSocket-Protocol"] = message["subprotocol"]
        self._protocol.send_response(response)
        self._timer = asyncio.get_running_loop().call_later(self._settings.heartbeat, self._beat)

    def _beat(self) -> None:
        """Send a ping, or cut the peer off if the one before has no pong or a close no answer."""
        if self._ping is not None or self._protocol.state is not State.OPEN:
            self._writer.transport.abort()
            return
        self._ping = os.urandom(4)
        self._protocol.send_ping(self._ping)
        for piece in self._protocol.data_to_send():
            self._writer.write(piece)
        self._timer = asyncio.get_running_loop().call_later(self._settings.heartbeat, self._beat)
