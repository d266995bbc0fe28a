"""The agent's proof of the token, before the upgrade of its WebSocket.

The challenge goes over the same connection, so that the ``Hello`` goes to the process that gave the proof.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.datastructures import HeadersLike
from websockets.http11 import USER_AGENT

from weightsync.config import ClientSettings, Secret
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, ProtocolError
from weightsync.protocol.endpoint import AGENTS_PATH, TRANSIENT_STATUS, no_challenge, unreachable
from weightsync.protocol.proof import Claimant

_MAX_BODY = 16 << 10


def proving_connection(settings: ClientSettings, token: Secret | None) -> type[ClientConnection]:
    """The class of connections to ``settings.coordinator`` that prove ``token``; without one, they show nothing and are refused."""
    if token is None:
        return ClientConnection
    claimant = Claimant(token, settings.coordinator)

    class Bound(_ProvingConnection):
        def __init__(self, protocol: ClientProtocol, **options: object) -> None:
            super().__init__(protocol, **options)  # type: ignore[arg-type]
            self._settings, self._claimant = settings, claimant

    return Bound


class _ProvingConnection(ClientConnection):
    _settings: ClientSettings
    _claimant: Claimant
    _asking: _Asking | None = None

    async def handshake(self, additional_headers: HeadersLike | None = None, user_agent_header: str | None = USER_AGENT) -> None:
        """See :class:`websockets.asyncio.client.ClientConnection`; the challenge comes first."""
        where = self._settings.coordinator
        self._asking = _Asking(self._settings)
        self.transport.write(self._asking.request(where.authority, self._claimant.target))
        body = await self._asking.answer  # bounded by the dial's own deadline
        self._asking = None
        try:
            self._claimant.accept(body)
        except ProtocolError as error:
            raise ConfigurationError(str(error)) from None
        proof, _ = self._claimant.authorization(f"GET {AGENTS_PATH}")  # the answer comes over the same connection
        await super().handshake({**dict(additional_headers or {}), "Authorization": proof}, user_agent_header)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._asking is not None:
            self._asking.feed(data)
        else:
            super().data_received(data)

    def eof_received(self) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._asking is not None:
            self._asking.feed(b"")
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._asking is not None:
            self._asking.feed(b"")
        super().connection_lost(exc)


class _Asking:
    """One HTTP request on a connection that is to become a WebSocket, and its answer."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._http = h11.Connection(h11.CLIENT)
        self._status = 0
        self._body = bytearray()
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def request(self, host: str, target: str) -> bytes:
        """The bytes to send."""
        head = self._http.send(h11.Request(method="GET", target=target, headers=[("Host", host)]))
        return (head or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    def feed(self, data: bytes) -> None:
        """Take what arrived; nothing means that no more comes."""
        if self.answer.done():
            return
        where = self._settings.coordinator
        try:
            self._http.receive_data(data)
            while not self.answer.done():
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    break
                match event:
                    case h11.Response(status_code=status):
                        self._status = status
                    case h11.Data(data=more):
                        self._body += more
                    case h11.EndOfMessage():
                        self._end()
                    case _:
                        raise h11.RemoteProtocolError("no answer")
                if len(self._body) > _MAX_BODY:
                    raise h11.RemoteProtocolError("an answer too long")
        except h11.RemoteProtocolError as error:
            if data:
                self._fail(ConfigurationError(f"what answers at {where} is not a weightsync coordinator: {error}"))
        if not data and not self.answer.done():
            self._fail(CoordinatorUnreachable(unreachable(self._settings, "the connection ended before a challenge came")))

    def _end(self) -> None:
        if self._status == HTTPStatus.OK:
            self.answer.set_result(bytes(self._body))
        elif self._status in TRANSIENT_STATUS:
            text = bytes(self._body).decode("utf-8", "replace")[:500]
            self._fail(CoordinatorUnreachable(unreachable(self._settings, f"HTTP {self._status}: {text}")))
        else:
            self._fail(ConfigurationError(no_challenge(self._settings, self._status)))

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
