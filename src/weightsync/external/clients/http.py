"""Requests to a running engine's own HTTP routes: as values, which the files of the engines build, and the client that sends them.

Knows no tensor library, so that a rollout controller and a vLLM worker send the same requests as ``weightsync push``.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from weightsync import errors
from weightsync.config import Secret
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, LoadError, PeerLost, ProtocolError, WeightSyncError
from weightsync.old_names import moved_names
from weightsync.protocol.messages import UNREADABLE
from weightsync.protocol.tokens import bearer

_CONNECT_SECONDS = 10.0
_CHUNK = 1 << 16
_MAX_REPLY = 1 << 20
_MAX_SHOWN = 2000


class HttpCall(NamedTuple):
    """One HTTP request, as a value. ``json`` of ``None``: a request without a body."""

    method: str
    path: str
    json: dict[str, Any] | None = None


class EngineHttp:
    """Sends requests to the engine at ``url``, each over its own connection. Thread-safe.

    A connection is not used again because vLLM closes one after an error, which the next request would meet. This is not httpx
    because an engine stands still meanwhile, and httpx takes twice as long for a small request. Proxies and redirects are not
    followed. ``missing_route`` is added to the error of a route that the engine does not have.

    Raises :class:`~weightsync.errors.ConfigurationError` if ``url`` is not an HTTP URL.
    """

    def __init__(self, url: str, token: Secret | None = None, missing_route: str = "") -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigurationError(f"{url!r} is not the URL of an engine; write it as http://host:port")
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._connection: Callable[..., HTTPConnection] = HTTPConnection
        if parts.scheme == "https":
            self._connection = partial(HTTPSConnection, context=ssl.create_default_context())
        self._prefix, self._missing_route = parts.path, missing_route
        self._headers = {"Content-Type": "application/json"} | bearer(token)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def call(self, call: HttpCall, deadline: Deadline) -> Any:  # noqa: ANN401 - JSON
        """Send one request and return its decoded answer; ``None`` if that is empty, its text if it is not JSON.

        Raises :class:`~weightsync.errors.LoadError` for what the engine refused, with the engine's reason,
        :class:`~weightsync.errors.AuthenticationError`, :class:`~weightsync.errors.PeerLost`, also after :meth:`close`,
        :class:`~weightsync.errors.DeadlineExceeded`, and :class:`~weightsync.errors.ProtocolError` for an answer that is too
        large. Errors of another weightsync are raised as what they are.
        """
        what = f"{call.method} {call.path} at {self.url}"
        body = None if call.json is None else msgspec.json.encode(call.json)
        seconds = min(deadline.remaining(what), _CONNECT_SECONDS)
        try:
            with closing(self._connection(self.host, self.port, timeout=seconds)) as connection:
                connection.connect()
                seconds = deadline.seconds
                with self._registered(connection.sock):
                    connection.sock.settimeout(deadline.remaining(what))
                    connection.request(call.method, self._prefix + call.path, body, self._headers)
                    status, content = _receive(connection, deadline, what)
        except WeightSyncError:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} had no answer within {seconds:.3g} s") from error
        except (OSError, HTTPException) as error:
            raise PeerLost(f"{what} failed: {str(error) or type(error).__name__}") from error
        return self._read(what, status, content)

    @contextmanager
    def _registered(self, sock: socket.socket) -> Iterator[None]:
        """Let :meth:`close` end what waits for ``sock``."""
        with self._lock:
            if self._closed:
                raise PeerLost(f"requests to {self.url} were ended")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def _read(self, what: str, status: int, content: bytes) -> Any:  # noqa: ANN401 - JSON
        try:
            decoded = msgspec.json.decode(content) if content else None
        except UNREADABLE:
            decoded = content.decode(errors="replace")[:_MAX_SHOWN]
        message = decoded
        if isinstance(decoded, dict):
            message = decoded.get("message", decoded.get("error", decoded.get("detail", decoded)))
        message = str(message)[:_MAX_SHOWN]
        if status in (401, 403):
            raise errors.AuthenticationError(f"{what}: {status} {message}")
        if status == 404 and self._missing_route:
            raise LoadError(f"{what}: {status} {message}: {self._missing_route}")
        if status >= 300 or (isinstance(decoded, dict) and decoded.get("success") is False):
            kind, colon, text = message.partition(": ")
            known = errors.from_wire(kind, f"{what}: {text}") if colon else None
            if known is not None and type(known) is not WeightSyncError:
                raise known
            raise LoadError(f"{what}: {status} {message}")
        return decoded

    def close(self) -> None:
        """End the calls under way, which then raise, and refuse new ones. Safe twice."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which another thread may be using


def _receive(connection: HTTPConnection, deadline: Deadline, what: str) -> tuple[int, bytes]:
    sock = connection.sock  # the connection lets go of it if the answer is its last
    content = bytearray()
    with closing(connection.getresponse()) as answer:
        while chunk := answer.read1(_CHUNK):
            content += chunk
            if len(content) > _MAX_REPLY:
                raise ProtocolError(f"{what}: an answer of more than {_MAX_REPLY} bytes")
            sock.settimeout(deadline.remaining(what))
        if answer.length:
            raise PeerLost(f"{what} failed: the answer ended {answer.length} bytes too early")
        return answer.status, bytes(content)


moved_names(
    __name__, "weightsync_disaggregated.clients.bodies", "GroupSpec", "bucket_body", "destroy_group", "init_group", "tensors_body"
)
