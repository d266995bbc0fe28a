"""HTTP clients: of a coordinator, with its errors and another attempt, and of anything that sends server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
import msgspec

from weightsync.config import ClientSettings, Secret, SecretKind
from weightsync.coordinator.events import Event
from weightsync.errors import AuthenticationError, ProtocolError, from_wire
from weightsync.protocol.endpoint import TRANSIENT_STATUS, no_challenge, tls_context
from weightsync.protocol.messages import UNREADABLE, decoding
from weightsync.protocol.proof import ANSWER_HEADER, Claimant
from weightsync.protocol.tokens import secret_of
from weightsync.server.problems import Problem

T = TypeVar("T")
_Flow = Generator[httpx.Request, httpx.Response, None]
_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

_TRUSTED_SECONDS = 2.0
_MISSED = 3  # heartbeats without a byte on the event stream
_EVENT_BYTES = 64 << 20  # the result of a round of all agents that a coordinator takes


class Backoff:
    """Pauses between attempts to reach a server, from ``first`` seconds, each twice as long as the one before, to ``most``."""

    def __init__(self, first: float = 0.05, most: float = 2.0) -> None:
        self._first, self._most = first, most
        self.reset()

    def reset(self) -> None:
        """Begin again with the first pause, after a success."""
        self._seconds = self._first

    async def rest(self, most: float = float("inf")) -> None:
        """Pause, at most ``most`` seconds."""
        await asyncio.sleep(min(self._seconds, most))
        self._seconds = min(2 * self._seconds, self._most)


def coordinator_http(settings: ClientSettings) -> httpx.AsyncClient:
    """Connections to the coordinator, which prove its token.

    For two seconds after the coordinator's last proof a request needs no new challenge, because these clients ask often. Something
    else that takes its address meanwhile gets the request, and its answer is not believed.

    Raises what :func:`~weightsync.protocol.tokens.find_token` raises.
    """
    return httpx.AsyncClient(**_options(settings, secret_of(settings), "token", _TRUSTED_SECONDS))


def blocking_http(settings: ClientSettings, operator: Secret | None = None) -> httpx.Client:
    """Connections to the coordinator for one thread. They prove the token, or the operator's if it is given or is the only one.

    Raises what :func:`~weightsync.protocol.tokens.find_token` raises.
    """
    token = secret_of(settings) if operator is None else None
    if token is not None:
        return httpx.Client(**_options(settings, token, "token", 0.0))
    return httpx.Client(**_options(settings, operator or secret_of(settings, "operator"), "operator", 0.0))


def _options(settings: ClientSettings, secret: Secret | None, kind: SecretKind, trusted_seconds: float) -> dict[str, Any]:
    context = tls_context(settings)
    return {
        "auth": None if secret is None else _Presenting(secret, settings, trusted_seconds, kind),
        "base_url": settings.coordinator.url,
        "timeout": settings.timeouts.connect,
        "verify": True if context is None else context,
        "trust_env": False,  # config.py is where the environment is read; a proxy must not stand in between
    }


class _Presenting(httpx.Auth):
    """Asks for a challenge, proves the token with each request, and looks for the coordinator's proof in each answer.

    Raises :class:`~weightsync.errors.AuthenticationError` for a coordinator that cannot prove that it has the token. If it could
    before, something else has taken its address for now, which is ``httpx.ConnectError``: the coordinator cannot be reached.
    """

    def __init__(self, token: Secret, settings: ClientSettings, trusted_seconds: float, kind: SecretKind) -> None:
        self._token, self._settings, self._trusted, self._kind = token, settings, trusted_seconds, kind
        self._claimant: Claimant | None = None
        self._proved_at: float | None = None

    def sync_auth_flow(self, request: httpx.Request) -> _Flow:
        """See :class:`httpx.Auth`."""
        return _OneRequest(self._flow).sync_auth_flow(request)

    def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """See :class:`httpx.Auth`."""
        return _OneRequest(self._flow).async_auth_flow(request)

    def _flow(self, request: httpx.Request) -> _Flow:
        """Challenges, whose answers are read, and ``request`` itself, whose answer may be a stream."""
        while True:
            claimant, fresh = self._held(), False
            if claimant is None:
                claimant, fresh = Claimant(self._token, self._settings.coordinator, self._kind), True
                self._accept(claimant, (yield self._challenge(claimant)), request)
            target = f"{request.method} {request.url.raw_path.decode('ascii')}"
            request.headers["Authorization"], expected = claimant.authorization(target)
            answer = yield request
            if hmac.compare_digest(answer.headers.get(ANSWER_HEADER, "").encode(), expected.encode()):
                self._proved_at = time.monotonic()
                return
            self._claimant = None
            if answer.status_code == HTTPStatus.UNAUTHORIZED and not fresh:
                continue  # restarted, or too late
            if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status_code != HTTPStatus.UNAUTHORIZED:
                raise httpx.ConnectError("what answers there cannot prove that it is the coordinator", request=request)
            return

    def _held(self) -> Claimant | None:
        """A challenge that is good for another request, to a coordinator that has just proved itself."""
        if self._claimant is None or self._proved_at is None or self._claimant.spent:
            return None
        return self._claimant if time.monotonic() - self._proved_at < self._trusted else None

    def _challenge(self, claimant: Claimant) -> httpx.Request:
        timeout = httpx.Timeout(self._settings.timeouts.connect).as_dict()
        return httpx.Request("GET", self._settings.coordinator.url + claimant.target, extensions={"timeout": timeout})

    def _accept(self, claimant: Claimant, answer: httpx.Response, request: httpx.Request) -> None:
        if answer.status_code in TRANSIENT_STATUS:
            raise httpx.ConnectError(f"HTTP {answer.status_code}", request=request)
        if answer.status_code == HTTPStatus.FORBIDDEN and self._kind == "operator":
            raise AuthenticationError(
                f"the coordinator at {self._settings.coordinator} has no operator's token, so it refuses operators' actions: start "
                "it with WEIGHTSYNC_OPERATOR_TOKEN or WEIGHTSYNC_OPERATOR_TOKEN_FILE, and give no worker that one"
            )
        try:
            if not answer.is_success:
                raise ProtocolError(no_challenge(self._settings, answer.status_code))
            claimant.accept(answer.content)
        except (AuthenticationError, ProtocolError) as error:
            if self._proved_at is not None:
                raise httpx.ConnectError(str(error), request=request) from error
            raise
        self._claimant, self._proved_at = claimant, time.monotonic()


class _OneRequest(httpx.Auth):
    """The flow of one request: httpx reads the answers to challenges, and not that to the request, which may be a stream."""

    def __init__(self, flow: Callable[[httpx.Request], _Flow]) -> None:
        self._flow = flow

    def auth_flow(self, request: httpx.Request) -> _Flow:
        """See :class:`httpx.Auth`, which looks at ``requires_response_body`` after each answer."""
        flow = self._flow(request)
        asked = next(flow)
        with suppress(StopIteration):
            while True:
                self.requires_response_body = asked is not request
                asked = flow.send((yield asked))


def event_timeout(settings: ClientSettings) -> httpx.Timeout:
    """Timeouts of a stream of events, which has a sign of life in each heartbeat."""
    return httpx.Timeout(settings.timeouts.connect, read=_MISSED * settings.timeouts.heartbeat)


def problem_in(answer: httpx.Response, settings: ClientSettings) -> Problem:
    """Return the coordinator's reason in an answer that was read and is no success. Raises ``ProtocolError`` if it has none."""
    try:
        return msgspec.json.decode(answer.content, type=Problem)
    except UNREADABLE:
        raise ProtocolError(
            f"what answers at {settings.coordinator} is not a weightsync coordinator (HTTP {answer.status_code})"
        ) from None


def check(answer: httpx.Response, settings: ClientSettings) -> None:
    """Raise the coordinator's error if there is one, ``AuthenticationError`` for a wrong token, otherwise ``ProtocolError``."""
    if answer.is_success:
        return
    problem = problem_in(answer, settings)
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise AuthenticationError(f"{settings.coordinator}: {problem.message}")
    raise from_wire(problem.kind, problem.message)


def check_status(answer: httpx.Response, settings: ClientSettings) -> None:
    """Like :func:`check` for an answer that is not read: ``ProtocolError`` for everything but a wrong token."""
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise AuthenticationError(f"{settings.coordinator}: the token is missing or wrong")
    if not answer.is_success:
        raise ProtocolError(f"{settings.coordinator} answered HTTP {answer.status_code}")


def decoded(answer: httpx.Response, kind: type[T], settings: ClientSettings) -> T:
    """Return the body of an answer. Raises :class:`~weightsync.errors.ProtocolError` unless it is a ``kind``."""
    wanted = getattr(kind, "__name__", kind)
    with decoding(f"{settings.coordinator} answered something else than a {wanted}: is it the same weightsync?"):
        return msgspec.json.decode(answer.content, type=kind)


def event_in(data: bytes, settings: ClientSettings) -> Event:
    """Return an event of the coordinator. Raises :class:`~weightsync.errors.ProtocolError` for anything else."""
    with decoding(f"{settings.coordinator} sent an invalid event"):
        return _EVENT.decode(data)


class EventReader:
    """The data of server-sent events, from the bytes of an answer as they arrive. Comments are dropped."""

    def __init__(self, sender: object, most: int = _EVENT_BYTES) -> None:
        self._sender, self._most, self._held = sender, most, bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete with ``part``.

        Raises:
            ProtocolError: A message is too long.
        """
        lines, newline, rest = part.rpartition(b"\n")
        if newline:
            whole, self._held = bytes(self._held + lines), bytearray()
            for line in whole.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        self._held += rest
        if len(self._held) > self._most:
            raise ProtocolError(f"{self._sender} sent a message of more than {self._most} bytes")


async def event_data(answer: httpx.Response, sender: object, most: int = _EVENT_BYTES) -> AsyncIterator[bytes]:
    """Yield the data of the events of an answer. Raises as :meth:`EventReader.feed`."""
    reader = EventReader(sender, most)
    async for part in answer.aiter_bytes():
        for data in reader.feed(part):
            yield data
