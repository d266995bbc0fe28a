"""Opening an agent's socket: connect, prove who we are, say Hello, read the Welcome. Every failure is a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from http import HTTPStatus

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError
from websockets.typing import Subprotocol

from weightsync.config import ClientSettings
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    ProtocolError,
    WeightSyncError,
    from_wire,
)
from weightsync.protocol.agent_proof import proving_connection
from weightsync.protocol.endpoint import (
    AGENTS_PATH,
    FRAME_LIMIT_HEADER,
    SUBPROTOCOL,
    TRANSIENT_STATUS,
    reason,
    tls_context,
    unreachable,
)
from weightsync.protocol.messages import Hello, Refused, Welcome, decode, encode
from weightsync.protocol.tokens import secret_of

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
                    await socket.close()
                raise
    except TimeoutError:
        raise CoordinatorUnreachable(unreachable(settings, f"no answer within {timeout:.3g} s")) from None


async def _connect(settings: ClientSettings, timeout: float) -> ClientConnection:
    try:
        return await connect(
            settings.coordinator.websocket + AGENTS_PATH,
            create_connection=proving_connection(settings, secret_of(settings)),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            ssl=tls_context(settings),
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
        raise ConfigurationError(f"{settings.coordinator} does not speak {SUBPROTOCOL}: {error}") from None
    except (InvalidHandshake, InvalidURI, ssl.SSLError) as error:
        if isinstance(error.__cause__, EOFError | OSError):  # gone in the middle of the handshake
            raise CoordinatorUnreachable(unreachable(settings, error)) from None
        raise ConfigurationError(f"what answers at {settings.coordinator} is not a weightsync coordinator: {error}") from None
    except OSError as error:
        raise CoordinatorUnreachable(unreachable(settings, reason(error))) from None


def _denied(settings: ClientSettings, error: InvalidStatus) -> WeightSyncError:
    status, body = error.response.status_code, bytes(error.response.body or b"")
    text = body.decode("utf-8", "replace")[:_MESSAGE_CHARS]
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return AuthenticationError(
            f"the coordinator at {settings.coordinator} wants another token (HTTP {status}): set WEIGHTSYNC_TOKEN or "
            "WEIGHTSYNC_TOKEN_FILE to the one that it was started with; one that it generated is found only by the same user "
            "on the same machine"
        )
    if status in TRANSIENT_STATUS:
        return CoordinatorUnreachable(unreachable(settings, f"HTTP {status}: {text}"))
    return ConfigurationError(f"the server at {settings.coordinator} did not accept a weightsync agent: HTTP {status}: {text}")


async def _greet(settings: ClientSettings, socket: ClientConnection, hello: Hello) -> Welcome:
    try:
        if socket.subprotocol != SUBPROTOCOL:
            raise ConfigurationError(f"what answers at {settings.coordinator} does not speak {SUBPROTOCOL}")
        data = encode(hello)
        limit = socket.response.headers.get(FRAME_LIMIT_HEADER, "") if socket.response is not None else ""
        if limit.isdigit() and len(data) > int(limit):
            raise ConfigurationError(
                f"the Hello of {hello.name}/{hello.rank} has {len(data):,} bytes, and the coordinator at {settings.coordinator} "
                f"takes {int(limit):,}: start it with a larger WEIGHTSYNC_FRAME_BYTES"
            )
        await socket.send(data)
        answer = await socket.recv()
    except ConnectionClosed as error:
        raise CoordinatorUnreachable(unreachable(settings, f"the connection ended after our Hello: {error}")) from None
    frame = decode(answer) if isinstance(answer, bytes) else None
    if isinstance(frame, Refused):
        raise from_wire(frame.kind, frame.message)
    if not isinstance(frame, Welcome):
        raise ProtocolError(f"the coordinator at {settings.coordinator} answered our Hello with a {type(frame).__name__}")
    return frame
