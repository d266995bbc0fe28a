"""The coordinator's HTTP routes: status, rounds, events, metrics, the status page, and the agents' WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightsync import __version__
from weightsync.config import SecretKind, ServerSettings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.events import Audited, Event, RoundEnded, RoundStarted
from weightsync.coordinator.status import RankStatus, Status
from weightsync.errors import WeightSyncError, readable
from weightsync.model import RoundTrace
from weightsync.protocol.endpoint import AGENTS_PATH
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.proof import ANSWER_HEADER, CHALLENGE_PATH, PATTERNS, SCHEME, Challenge, Challenger
from weightsync.protocol.tokens import Secrets, matches
from weightsync.server import page
from weightsync.server.agents import ADAPTERS, AgentSockets
from weightsync.server.connections import Connections
from weightsync.server.history import MOST_ROUNDS, RoundHistory, RoundRecord, record_of, running_record
from weightsync.server.http_connection import TRANSPORT
from weightsync.server.loop_share import LoopShare, Snapshot
from weightsync.server.metrics import CONTENT_TYPE, CoordinatorMetrics
from weightsync.server.mounts import Mount
from weightsync.server.openapi import Operation, Revocation, RoundRequest, decode_body, document
from weightsync.server.otel import OtelExport
from weightsync.server.problems import body_of, problem, problem_of
from weightsync.server.routers import Routers
from weightsync.server.served import MOST_SECONDS, SERVED_PATH, Served, encode_served, while_connected

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


_HOLDER = "weightsync.holder"
"""Entry of an ASGI scope: the kind of secret that the peer has proved."""
_CONFLICTS = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT)


def _range(name: str, most: int) -> tuple[tuple[str, Any], ...]:
    """The only query parameter of a route: a number from 1 to ``most``."""
    return ((name, Annotated[int, msgspec.Meta(ge=1, le=most)]),)


OPERATIONS = (
    Operation("get", "/healthz", "Whether the coordinator runs.", dict[str, str], public=True),
    Operation("get", "/", "The status page for people.", str, "text/html", public=True),
    Operation(
        "get", CHALLENGE_PATH,
        "Prove that the coordinator has the token, and give a nonce with which a client proves the same without sending it.",
        Challenge, public=True, required=("nonce",), errors=(HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN),
        query=(
            ("nonce", Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]), ("of", Literal["token", "operator"]),
            ("adapters", Annotated[str, msgspec.Meta(pattern=f"^{PATTERNS.pattern}$")]),
        ),
    ),
    Operation("get", "/v1/status", "Who serves which version, how stale, and the last rounds.", Status),
    Operation(
        "get", SERVED_PATH, "The tensors that the replicas hold, as in their checkpoint; waits for the first replica.", Served,
        query=_range("timeout", MOST_SECONDS), errors=_CONFLICTS,
    ),
    Operation(
        "post", "/v1/rounds", "Bring replicas to the version that the trainer's regions hold; answers when the round is over.",
        RoundResult, body=RoundRequest, errors=(*_CONFLICTS, HTTPStatus.REQUEST_ENTITY_TOO_LARGE), operator=True,
    ),
    Operation(
        "get", "/v1/rounds", "The last rounds, also those of earlier coordinators with the same state folder; newest last.",
        tuple[RoundRecord, ...], query=_range("last", MOST_ROUNDS), errors=(HTTPStatus.BAD_REQUEST,),
    ),
    Operation(
        "get", "/v1/trace", "What every process did in one of the last rounds; by default in the last one.", RoundTrace,
        query=_range("round", 1 << 62), errors=(HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND),
    ),
    Operation(
        "post", "/v1/revocations",
        "Close the connection of a rank and refuse its credential, so that another process can take its place.", RankStatus,
        body=Revocation, errors=(HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE), operator=True,
    ),
    Operation(
        "get", "/v1/events", "Server-sent events: each data line is one event. A reader that falls behind loses the oldest.",
        Event, "text/event-stream", errors=(HTTPStatus.SERVICE_UNAVAILABLE,),
    ),
    Operation("get", "/v1/openapi.json", "This description.", dict[str, Any]),
    Operation("get", "/metrics", "The same for Prometheus.", str, "text/plain"),
)  # fmt: skip
_UNCOUNTED = ("/healthz", CHALLENGE_PATH, "/v1/events", SERVED_PATH)  # must always answer; has its own limit; waits
_SHOWN_ROUNDS = 20
_KINDS: tuple[SecretKind, ...] = get_args(SecretKind)
_OPERATOR = "WEIGHTSYNC_OPERATOR_TOKEN or WEIGHTSYNC_OPERATOR_TOKEN_FILE"
_NO_OPERATOR = (
    f"this coordinator has no operator's token, so it refuses operators' actions: start it with {_OPERATOR}, and use that"
)
_WORKERS_TOKEN = f"the token of the workers does not admit to operators' actions: set {_OPERATOR} to the coordinator's"
_SHARE, _AHEAD_SECONDS = 0.1, 2.0  # of the event loop's time that requests take: in the long run, and how much of it at once
_PUBLIC = frozenset(operation.path for operation in OPERATIONS if operation.public)


class Service:
    """One coordinator over HTTP. Built and closed on the coordinator's event loop; :attr:`asgi` is the application."""

    def __init__(self, coordinator: Coordinator, settings: ServerSettings, secrets: Secrets, mounts: Sequence[Mount] = ()) -> None:
        self._coordinator, self._settings = coordinator, settings
        self._agents = AgentSockets(coordinator, settings)
        self.connections = Connections(settings.limits, encrypted=settings.tls_certificate is not None)
        self._mounts = mounts
        self._challengers: dict[SecretKind, Challenger] = {"token": Challenger(secrets.token)}
        if secrets.operator is not None:
            self._challengers["operator"] = Challenger(secrets.operator)
        self._streams = EventStreams(settings.limits.event_streams, settings.heartbeat)
        self._metrics = CoordinatorMetrics()
        self._otel = OtelExport() if settings.otel == "on" else None
        self._history = RoundHistory(settings.history_directory, coordinator.settings.run)
        self._followers = [asyncio.ensure_future(self._count()), asyncio.ensure_future(self._remember())]
        self._state = Snapshot(
            lambda: msgspec.json.encode(msgspec.structs.replace(coordinator.status(), release=__version__)),
            lambda: coordinator.past.results and coordinator.past.results[-1],  # new after each round
        )
        self._routers = Routers(coordinator, settings) if settings.routers else None
        self._exposition = Snapshot(
            lambda: self._metrics.text(coordinator.gauges(), {} if self._routers is None else self._routers.settled())
        )
        uncounted = frozenset([*_UNCOUNTED, *(path for mount in mounts for path in mount.lasting)])
        endpoints = (
            self._health, self._page, self._challenge, self._status, self._served, self._round, self._rounds, self._trace,
            self._revoke, self._events, self._openapi, self._exposed,
        )  # fmt: skip
        routes = [
            *(_route(operation, endpoint) for operation, endpoint in zip(OPERATIONS, endpoints, strict=True)),
            WebSocketRoute(AGENTS_PATH, self._agents.endpoint),
            *(route for mount in mounts for route in mount.routes),
        ]
        self.asgi: ASGIApp = Starlette(
            routes=routes,
            middleware=[
                Middleware(TokenAdmission, secrets=secrets, challengers=self._challengers, connections=self.connections),
                Middleware(LoopShare, share=_SHARE, ahead=_AHEAD_SECONDS, uncounted=_PUBLIC),
                Middleware(_Busy, most=settings.limits.requests, uncounted=uncounted),
            ],
            exception_handlers=dict.fromkeys((WeightSyncError, HTTPException, Exception), _failed),
        )

    async def continue_rounds(self) -> None:
        """Number rounds from where the history of this run ends."""
        self._coordinator.rounds = await self._history.last_round()

    async def aclose(self, reason: str) -> None:
        """Cancel rounds, end event streams, close every agent's socket with ``reason``. Safe twice."""
        for mount in self._mounts:
            mount.close()
        # Before agents go: a replica in the middle of an update can still be ordered to stay paused.
        await self._coordinator.aclose()
        if self._routers is not None:  # before the agents: routers must not hear that all replicas left
            await self._routers.aclose()
        await self._agents.aclose(reason)
        await asyncio.wait(self._followers, timeout=self._settings.shutdown_seconds)
        for follower in self._followers:
            follower.cancel()
        await self._history.aclose()
        if self._otel is not None:
            await self._otel.aclose()

    async def _count(self) -> None:
        async for event in self._coordinator.subscribe():
            if isinstance(event, RoundEnded):
                traced = self._coordinator.past.traced(event.round)
                self._metrics.count(event, traced)
                if self._otel is not None and traced is not None:
                    self._otel.export(traced.trace)
            elif isinstance(event, Audited):
                self._metrics.count_audit(event)

    async def _remember(self) -> None:
        run, started = self._coordinator.settings.run, None
        async for event in self._coordinator.subscribe():
            if isinstance(event, RoundStarted):
                started = event
                await self._history.add(running_record(run, started))
            elif isinstance(event, RoundEnded) and started is not None:
                await self._history.add(record_of(run, started, event))

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _page(self, request: Request) -> Response:
        if not page.is_own_name(request.headers.get("host", ""), self._settings.host):
            why = "this page is for this machine alone: open it under 127.0.0.1 or localhost"
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, why)
        return Response(page.HTML, media_type="text/html", headers=page.HEADERS)

    async def _challenge(self, request: Request) -> Response:
        kind = request.query_params.get("of", "token")
        if kind not in ("token", "operator"):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "of is token or operator")
        if kind not in self._challengers:
            return problem(HTTPStatus.FORBIDDEN, "AuthenticationError", _NO_OPERATOR)
        given = request.query_params
        return _json(self._challengers[kind].challenge(given.get("nonce", ""), given.get("adapters", "")))

    async def _status(self, request: Request) -> Response:
        return _answer(self._state.get())

    async def _served(self, request: Request) -> Response:
        whole = self._coordinator.attendance.whole(_number(request, "timeout", 1, MOST_SECONDS))
        replica = await while_connected(request, whole)
        return _answer(encode_served(replica.name, replica.manifest))

    async def _openapi(self, request: Request) -> Response:
        return _json(document((*OPERATIONS, *(operation for mount in self._mounts for operation in mount.operations)), __version__))

    async def _exposed(self, request: Request) -> Response:
        return Response(self._exposition.get(), headers={"Content-Type": CONTENT_TYPE})

    async def _round(self, request: Request) -> Response:
        wanted = decode_body(await self._body(request), RoundRequest, "a request for a round")
        return _json(await self._coordinator.seed(wanted.replicas, wanted.timeout))

    async def _rounds(self, request: Request) -> Response:
        count = _number(request, "last", _SHOWN_ROUNDS, MOST_ROUNDS)
        return _json(await self._history.last(count))

    async def _trace(self, request: Request) -> Response:
        traces = self._coordinator.past.traces
        wanted = _number(request, "round", traces[-1].round if traces else 0, 1 << 62)
        traced = self._coordinator.past.traced(wanted)
        if traced is None:
            why = f"rounds {traces[0].round} to {traces[-1].round} are kept" if traces else "no round ended, or WEIGHTSYNC_TRACES=0"
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no trace of round {wanted}; {why}")
        return _json(traced.trace)

    async def _revoke(self, request: Request) -> Response:
        revocation = decode_body(await self._body(request), Revocation, "a revocation")
        return _json(self._coordinator.revoke(revocation.member))

    async def _body(self, request: Request) -> bytes:
        return await body_of(request, self._settings.limits.body_bytes)

    async def _events(self, request: Request) -> Response:
        return self._streams.respond(request, self._coordinator.subscribe, _event)


def _route(operation: Operation, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    answer = operators_only(endpoint) if operation.operator else endpoint
    return Route(operation.path, answer, methods=[operation.method.upper()])


def _event(event: Event) -> bytes:
    return b"event: " + type(event).__name__.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def operators_only(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Let ``endpoint`` answer holders of the operator's secret alone; all others get 403. Its operation says ``operator=True``."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        holder, among = request.scope[_HOLDER]
        if holder == "operator":
            return await endpoint(request)
        why = _WORKERS_TOKEN if "operator" in among else _NO_OPERATOR
        return problem(HTTPStatus.FORBIDDEN, "AuthenticationError", f"{request.method} {request.url.path}: {why}")

    return answer


@dataclass(eq=False)
class TokenAdmission:
    """Refuses requests without a secret or a proof of it, except for public paths; also for routes that do not exist.

    Puts the kind of the secret into the scope, for :func:`operators_only`. What admits to the metrics admits to nothing else.
    """

    app: ASGIApp
    secrets: Secrets
    challengers: Mapping[SecretKind, Challenger]
    connections: Connections
    public: frozenset[str] = _PUBLIC

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is admitted."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        public = scope["type"] == "http" and scope["path"] in self.public
        holder, answer, adapters = self._admits(given[0].decode("latin-1"), scope) if len(given) == 1 else (None, "", "")
        if holder is not None:
            self.connections.proved(scope.get(TRANSPORT))
            send = _with(send, ANSWER_HEADER, answer) if answer else send
            only, path = ("/metrics", "/metrics") if holder == "metrics" else (f"publishing the adapters {adapters}", AGENTS_PATH)
            if (holder == "metrics" or adapters) and not public and scope["path"] != path:
                await problem(HTTPStatus.FORBIDDEN, "AuthenticationError", f"this token admits to {only} only")(
                    scope, receive, _last(send)
                )
                return
            await self.app({**scope, _HOLDER: (holder, self.challengers), ADAPTERS: adapters}, receive, send)
            return
        if public:
            # A client that asks for a challenge proves the token on the same connection next. A body is not read.
            asks = scope["method"] == "GET" and scope["path"] == CHALLENGE_PATH
            stays = asks and self.connections.may_stay(scope.get(TRANSPORT))
            await self.app(scope, receive, send if stays else _last(send))
            return
        why = "this needs the token"
        if given:
            kind = given[0].decode("latin-1").partition(" ")[0]
            why = "the proof is wrong, too old or used before" if kind == SCHEME else "the bearer token is wrong"
        message = f"{why}: set WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE to the one that the coordinator was started with"
        await problem(HTTPStatus.UNAUTHORIZED, "AuthenticationError", message)(scope, receive, _last(send))

    def _admits(self, header: str, scope: Scope) -> tuple[SecretKind | None, str, str]:
        """Return the kind of secret, ``None`` without one, and the proof to answer with (empty if the peer sent the secret).

        With it the patterns of a token that is limited to publishing adapters; empty for any other.
        """
        for kind in _KINDS:
            secret = getattr(self.secrets, kind)
            if secret is not None and matches(header, secret):
                return kind, "", ""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        request = f"{scope.get('method', 'GET')} {target.decode('latin-1')}"
        for kind, challenger in self.challengers.items():
            answer = challenger.admits(header, request)
            if answer is not None:
                return kind, *answer
        return None, "", ""


def _with(send: Send, name: str, value: str) -> Send:
    """Add a header to the answer."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name.lower().encode(), value.encode())]}
        await send(message)

    return adding


def _last(send: Send) -> Send:
    """Close the connection after the answer: a peer without the token must connect again, which is rate-limited."""
    return _with(send, "Connection", "close")


class _Busy:
    """Refuses requests beyond so many under way, so that callers that never wait for answers cannot pile up work."""

    def __init__(self, app: ASGIApp, most: int, uncounted: frozenset[str]) -> None:
        self._app, self._most, self._uncounted = app, most, uncounted
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._uncounted:
            await self._app(scope, receive, send)
            return
        if self._running >= self._most:
            message = f"{self._running} requests are under way already (WEIGHTSYNC_REQUESTS); try again later"
            await problem(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", message)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


def _number(request: Request, name: str, default: int, most: int) -> int:
    """Return the only query parameter that the route has, from 1 to ``most``."""
    unknown = sorted(request.query_params.keys() - {name})
    if unknown:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"there is no parameter {readable(unknown[0])}: only {name}")
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) <= most):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is a number from 1 to {most}")
    return int(text)


def _json(value: object) -> Response:
    return _answer(msgspec.json.encode(value))


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return problem_of(error)
    status = HTTPStatus(error.status_code)
    kind = "".join(word.capitalize() for word in status.phrase.split())
    return problem(status, kind, f"{request.method} {request.url.path}: {error.detail}", dict(error.headers or {}))
