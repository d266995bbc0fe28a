"""Opening an agent's socket: connect, prove who we are, say Hello, read the Welcome. Every failure is a typed error.

The agent's proof of the token, before the upgrade of its WebSocket.

The challenge goes over the same connection, so that the ``Hello`` goes to the process that gave the proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from http import HTTPStatus

import h11
from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.datastructures import HeadersLike
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError
from websockets.frames import CloseCode
from websockets.http11 import USER_AGENT
from websockets.typing import Subprotocol

from weightsync import errors
from weightsync.config import ClientSettings, Secret
from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable, ProtocolError, WeightSyncError
from weightsync.protocol import endpoint
from weightsync.protocol.messages import Hello, Refused, Welcome, decode, encode
from weightsync.protocol.proof import Claimant
from weightsync.protocol.tokens import secret_of

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
        proof, _ = self._claimant.authorization(f"GET {endpoint.AGENTS_PATH}")  # the answer comes over the same connection
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
            self._fail(CoordinatorUnreachable(endpoint.unreachable(self._settings, "the connection ended before a challenge came")))

    def _end(self) -> None:
        if self._status == HTTPStatus.OK:
            self.answer.set_result(bytes(self._body))
        elif self._status in endpoint.TRANSIENT_STATUS:
            text = bytes(self._body).decode("utf-8", "replace")[:500]
            self._fail(CoordinatorUnreachable(endpoint.unreachable(self._settings, f"HTTP {self._status}: {text}")))
        else:
            self._fail(ConfigurationError(endpoint.no_challenge(self._settings, self._status)))

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


_CLOSE_SECONDS = 1.0
_wire_log = logging.getLogger("weightsync.websocket")
_wire_log.setLevel(logging.INFO)  # at DEBUG the library would log the bearer token and the keys in frames
_MESSAGE_CHARS = 500


async def dial(settings: ClientSettings, hello: Hello, timeout: float) -> tuple[ClientConnection, Welcome]:
    """A socket on which the coordinator has welcomed ``hello``, within ``timeout`` seconds.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable` if no server answers (worth another try),
    :class:`~weightsync.errors.AuthenticationError` for a token that is missing or wrong, or a coordinator that cannot prove that it
    has it (the token itself is never sent),
    :class:`~weightsync.errors.ConfigurationError` if something else than a coordinator answers, and the error that the
    coordinator gave as its reason if it refuses the rank.
    """
    try:
        async with asyncio.timeout(timeout):
            socket = await _connect(settings, timeout)
            try:
                return socket, await _greet(settings, socket, hello)
            except BaseException:
                with contextlib.suppress(OSError, TimeoutError):
                    await hang_up(socket)
                raise
    except TimeoutError:
        raise CoordinatorUnreachable(endpoint.unreachable(settings, f"no answer within {timeout:.3g} s")) from None


async def hang_up(socket: ClientConnection, code: int = CloseCode.NORMAL_CLOSURE, why: str = "") -> None:
    """Close ``socket``, and drop the connection if this is cancelled: nothing else would close it."""
    try:
        await socket.close(code, why)
    except asyncio.CancelledError:
        socket.transport.abort()
        raise


async def _connect(settings: ClientSettings, timeout: float) -> ClientConnection:
    try:
        return await connect(
            settings.coordinator.websocket + endpoint.AGENTS_PATH,
            create_connection=proving_connection(settings, secret_of(settings)),
            subprotocols=[Subprotocol(endpoint.SUBPROTOCOL)],
            ssl=endpoint.tls_context(settings),
            proxy=None,
            compression=None,
            logger=_wire_log,
            max_size=settings.frame_bytes,
            open_timeout=timeout,
            close_timeout=_CLOSE_SECONDS,
            ping_interval=settings.timeouts.heartbeat,
            ping_timeout=settings.timeouts.heartbeat,
        )
    except InvalidStatus as error:
        raise _denied(settings, error) from None
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(
            f"the certificate of {settings.coordinator} is not trusted: {error.verify_message}; give its CA by WEIGHTSYNC_CA_FILE"
        ) from None
    except NegotiationError as error:
        raise ConfigurationError(f"{settings.coordinator} does not speak {endpoint.SUBPROTOCOL}: {error}") from None
    except (InvalidHandshake, InvalidURI, ssl.SSLError) as error:
        if isinstance(error.__cause__, EOFError | OSError):  # gone in the middle of the handshake
            raise CoordinatorUnreachable(endpoint.unreachable(settings, error)) from None
        raise ConfigurationError(f"what answers at {settings.coordinator} is not a weightsync coordinator: {error}") from None
    except OSError as error:
        raise CoordinatorUnreachable(endpoint.unreachable(settings, endpoint.reason(error))) from None


def _denied(settings: ClientSettings, error: InvalidStatus) -> WeightSyncError:
    status, body = error.response.status_code, bytes(error.response.body or b"")
    text = body.decode("utf-8", "replace")[:_MESSAGE_CHARS]
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return AuthenticationError(
            f"the coordinator at {settings.coordinator} wants another token (HTTP {status}): set WEIGHTSYNC_TOKEN or "
            "WEIGHTSYNC_TOKEN_FILE to the one that it was started with; one that it generated is found only by the same user "
            "on the same machine"
        )
    if status in endpoint.TRANSIENT_STATUS:
        return CoordinatorUnreachable(endpoint.unreachable(settings, f"HTTP {status}: {text}"))
    return ConfigurationError(f"the server at {settings.coordinator} did not accept a weightsync agent: HTTP {status}: {text}")


async def _greet(settings: ClientSettings, socket: ClientConnection, hello: Hello) -> Welcome:
    try:
        if socket.subprotocol != endpoint.SUBPROTOCOL:
            raise ConfigurationError(f"what answers at {settings.coordinator} does not speak {endpoint.SUBPROTOCOL}")
        data = encode(hello)
        limit = socket.response.headers.get(endpoint.FRAME_LIMIT_HEADER, "") if socket.response is not None else ""
        if limit.isdigit() and len(data) > int(limit):
            raise ConfigurationError(
                f"the Hello of {hello.name}/{hello.rank} has {len(data):,} bytes, and the coordinator at {settings.coordinator} "
                f"takes {int(limit):,}: start it with a larger WEIGHTSYNC_FRAME_BYTES"
            )
        await socket.send(data)
        answer = await socket.recv()
    except ConnectionClosed as error:
        raise CoordinatorUnreachable(endpoint.unreachable(settings, f"the connection ended after our Hello: {error}")) from None
    frame = decode(answer) if isinstance(answer, bytes) else None
    if isinstance(frame, Refused):
        raise errors.from_wire(frame.kind, frame.message)
    if not isinstance(frame, Welcome):
        raise ProtocolError(f"the coordinator at {settings.coordinator} answered our Hello with a {type(frame).__name__}")
    return frame
