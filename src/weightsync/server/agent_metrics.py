"""Metrics of trainer and engine processes, on a separate port: off by default, on loopback only, with a token.

All ranks of a process share one server, which runs on the event loop of their connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightsync.config import ClientSettings, Limits, SecretKind, ServerSettings
from weightsync.errors import ConfigurationError
from weightsync.model import Version
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.event_loop import shared_loop
from weightsync.protocol.messages import Answer, Body, Failure
from weightsync.protocol.proof import Challenger
from weightsync.protocol.tokens import Secrets, secret_of
from weightsync.server.accept_limiter import AcceptLimiter
from weightsync.server.app import TokenAdmission
from weightsync.server.connections import Connections
from weightsync.server.metrics import BUILD_INFO, CONTENT_TYPE, Declared, Registry
from weightsync.spans import Span

_log = logging.getLogger(__name__)

AGENT_METRICS = (
    BUILD_INFO,
    Declared("rank_connected", "gauge", ("rank",), "1 while the rank is connected to the coordinator."),
    Declared(
        "rank_version", "gauge", ("rank",),
        "Version number that the engine rank serves, or that the trainer rank published last; absent without one.",
    ),
    Declared("rank_calls_total", "counter", ("rank", "call", "outcome"), "Calls of the coordinator that the rank answered."),
    Declared("rank_call_seconds", "histogram", ("rank", "call"), "Time from a call's arrival to its answer."),
    Declared("rank_phase_seconds", "histogram", ("rank", "phase"), "Duration of a phase of a call."),
    Declared("rank_read_bytes_total", "counter", ("rank", "transport"), "Bytes that the engine rank read from trainer ranks."),
)  # fmt: skip

_LOOPBACK = "127.0.0.1"
_LIMITS = Limits(connections=64, unauthenticated=16, requests=4)
_SECONDS = 5.0


class AgentMetrics:
    """Metrics of all ranks of this process. The first one starts the server, the last one ends it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[str, tuple[CoordinatorConnection, Callable[[], Version | None]]] = {}
        self._registry = Registry(AGENT_METRICS)
        self._server: ExitStack | None = None
        self.port: int | None = None
        """Port of the server, while it runs."""

    def join(
        self, settings: ClientSettings, member: str, rank: int, link: CoordinatorConnection, version: Callable[[], Version | None]
    ) -> Callable[[], None]:
        """Expose a rank, on the settings' port plus ``rank`` if this process has no server yet. Comes before ``link.connect()``.

        Returns:
            What ends that.

        Raises:
            ConfigurationError: The port is taken, or there is no token.
        """
        exposed = link, version
        with self._lock:
            if self._server is None:
                self._start(settings, rank)
            self._ranks[member] = exposed
        link.on_answer = partial(self._answered, member)

        def leave() -> None:
            with self._lock:
                if self._ranks.get(member) is exposed:
                    del self._ranks[member]
                if not self._ranks and self._server is not None:
                    server, self._server, self.port = self._server, None, None
                    server.close()

        return leave

    def _answered(self, member: str, body: Body, frame: Answer | Failure, seconds: float, spans: tuple[Span, ...]) -> None:
        """Count a call that a rank answered."""
        registry, call = self._registry, type(body).__name__
        outcome = frame.kind if isinstance(frame, Failure) else "ok"
        registry.add("rank_calls_total", rank=member, call=call, outcome=outcome)
        registry.observe("rank_call_seconds", seconds, rank=member, call=call)
        for span in spans:
            registry.observe("rank_phase_seconds", span.busy, rank=member, phase=span.name)
            if span.transport:
                registry.add("rank_read_bytes_total", span.nbytes, rank=member, transport=span.transport)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        with self._lock:
            ranks = dict(self._ranks)
        versions = {member: version() for member, (_, version) in ranks.items()}
        self._registry.replace("rank_connected", [({"rank": member}, float(link.connected)) for member, (link, _) in ranks.items()])
        self._registry.replace(
            "rank_version", [({"rank": member}, version.number) for member, version in versions.items() if version is not None]
        )
        return self._registry.text()

    def _start(self, settings: ClientSettings, rank: int) -> None:
        token, metrics = secret_of(settings, "token"), secret_of(settings, "metrics")
        port = (settings.metrics_port or 0) + (rank if settings.metrics_port else 0)
        if token is None:
            raise ConfigurationError("WEIGHTSYNC_METRICS_PORT needs the coordinator's token: set WEIGHTSYNC_TOKEN_FILE")
        with ExitStack() as owned:
            try:
                listener = owned.enter_context(socket.create_server((_LOOPBACK, port)))
            except (OSError, OverflowError) as error:
                raise ConfigurationError(
                    f"the metrics of this process cannot be served on port {port}: {error}. WEIGHTSYNC_METRICS_PORT is the port of "
                    "rank 0, and 0 takes any free one"
                ) from None
            loop = shared_loop.borrow()
            owned.callback(shared_loop.give_back, _SECONDS)
            limiter = asyncio.run_coroutine_threadsafe(self._open(listener, Secrets(token, metrics=metrics)), loop).result(_SECONDS)
            owned.callback(lambda: asyncio.run_coroutine_threadsafe(limiter.aclose(_SECONDS), loop).result(2 * _SECONDS))
            self.port = listener.getsockname()[1]
            _log.info("metrics of this process: http://%s:%d/metrics", _LOOPBACK, self.port)
            self._server = owned.pop_all()

    async def _open(self, listener: socket.socket, secrets: Secrets) -> AcceptLimiter:
        async def metrics(request: Request) -> Response:
            return Response(self.text(), headers={"Content-Type": CONTENT_TYPE})

        connections = Connections(_LIMITS)
        challengers: dict[SecretKind, Challenger] = {"token": Challenger(secrets.token)}
        app = TokenAdmission(Starlette(routes=[Route("/metrics", metrics)]), secrets, challengers, connections, frozenset())
        limiter = AcceptLimiter(listener, app, ServerSettings(limits=_LIMITS), connections)
        limiter.open()
        return limiter


agent_metrics = AgentMetrics()
"""Those of this process. A forked child has none, because threads do not survive a fork."""

os.register_at_fork(after_in_child=agent_metrics.__init__)  # type: ignore[misc]
