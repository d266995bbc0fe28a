"""Requests that name a version: ASGI middleware for an engine's server, with a readiness route. It never reads a body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import VersionError, readable
from weightsync.model import Version, parse_label
from weightsync.model.lora import newest_label

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH_PATH = "/health/weights"
_EXACT, _LEAST = b"x-weightsync-version", b"x-weightsync-min-version"
_MEMBERS = {"weightsync": _EXACT, "weightsync-min": _LEAST}
"""The same in ``tracestate``, which routers pass on that drop headers they do not know (sglang-router does)."""
_LABEL = re.compile(r"[!-~]{1,250}@[0-9]{1,18}")
_NONE = "no verified version: none has arrived, one is being installed, or the last update failed"


class _Demands(NamedTuple):
    """Demands of one request. A label satisfies all of them or the request is refused."""

    exact: tuple[str, ...]
    least: tuple[str, ...]

    @property
    def shown(self) -> str:
        """For messages."""
        return " and ".join([*self.exact, *(f"{text} or later" for text in self.least)])

    def among(self, adapters: Collection[str]) -> list[str]:
        """The newest of ``adapters`` under each name that is demanded."""
        names = dict.fromkeys(text.rpartition("@")[0] for text in (*self.exact, *self.least))
        return list(filter(None, (newest_label(name, adapters) for name in names)))

    def allows(self, label: str | None, adapters: Collection[str] = ()) -> bool:
        """Whether the version ``label``, and the newest of ``adapters``, may answer."""
        has = dict[str | None, tuple[int, int]]()
        for text in (*self.among(adapters), *filter(None, [label])):
            if (parsed := parse_label(text)) is not None:
                has[parsed[0]] = parsed[1:]
        wanted = [(parse_label(text), text in self.exact) for text in (*self.exact, *self.least)]
        return all(
            want is not None and want[0] in has and (want[1:] == has[want[0]] if exact else want[1:] <= has[want[0]])
            for want, exact in wanted
        )


@dataclass
class _Request:
    """A request that the middleware has passed on, and the version that was served then."""

    wanted: _Demands
    label: str | None
    contradiction: str = ""
    held: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Versions of adapters that it uses, and what is called for each when it has ended."""


_current = ContextVar[_Request | None]("weightsync_request", default=None)
"""The one in whose context an engine runs: tasks that a server makes for it have a copy."""


def held_by_request() -> dict[str, Callable[[], None]] | None:
    """Return which versions of adapters the request of this context uses to its end; ``None`` outside of requests.

    Each is a label, and what is called when the request has ended: an engine may be called several times for one request.
    """
    request = _current.get()
    return None if request is None else request.held


def check_adapter(label: str | None) -> None:
    """Raise ValueError if the request of this context names another version in its headers than ``label``, which it is to get.

    ``label`` is that of an adapter, by the model in its body; ``None``: without one of ours. Engines call this when they know. The
    middleware answers 409 then, whatever the server makes of the error. Servers take a ValueError for a fault of their client, and
    close no connection.
    """
    request = _current.get()
    if request is not None and not request.wanted.allows(request.label, [] if label is None else [label]):
        named = "no adapter of weightsync's" if label is None else label
        request.contradiction = f"the headers of the request ask for {request.wanted.shown}, and its body for {named}"
        raise ValueError(request.contradiction)


class VersionedRequests:
    """Middleware that refuses requests which name another version than the one that would answer, and says which one answered.

    ``X-Weightsync-Version: run@7`` asks for this version, ``X-Weightsync-Min-Version: run@7`` for this or a later one of the run.
    Otherwise the answer is 409 with the version that the server has, before the engine sees the request; a malformed name is 400.
    ``alice/math@3`` is compared with the newest version of this LoRA adapter, which a request for ``alice/math`` gets. Every answer
    has ``X-Weightsync-Version`` with what was served when the request came and when its answer began. A request for exactly one
    version that an update overtakes is refused with 409, or cut off if its answer has begun; so is any whose server has an earlier
    version by then, or one of another run. ``GET /health/weights`` is 200 while a verified version is served, and 503 otherwise.

    Args:
        app: The server's application.
        served: Returns the version that is served now, or its label; ``None`` from a pause to the end of the update.
        adapters: Returns the labels of the LoRA adapters that are served now.
    """

    def __init__(
        self, app: ASGIApp, served: Callable[[], Version | str | None], adapters: Callable[[], Collection[str]] = tuple
    ) -> None:
        self._app, self._served, self._adapters = app, served, adapters

    def _label(self) -> str | None:
        label = str(self._served() or "")
        return label if _LABEL.fullmatch(label) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the readiness route and what is refused. Pass on everything else."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        label = self._label()
        if scope["type"] == "http" and scope["path"] == HEALTH_PATH:
            status = HTTPStatus.SERVICE_UNAVAILABLE if label is None else HTTPStatus.OK
            await _answer(send, scope, status, {"version": label, **({"error": _NONE} if label is None else {})}, label)
            return
        try:
            wanted = _wanted(scope["headers"])
        except VersionError as error:
            await _answer(send, scope, HTTPStatus.BAD_REQUEST, _error(HTTPStatus.BAD_REQUEST, str(error), label), label)
            return
        if not wanted.allows(label, adapters := self._adapters()):
            await _refuse(send, scope, wanted, label, adapters)
            return
        request = _Request(wanted, label)
        before = _current.set(request)
        try:
            await self._app(scope, receive, self._watched(send, scope, request, of_adapter=bool(wanted.among(adapters))))
        finally:
            _current.reset(before)
            for ended in request.held.values():
                ended()

    def _watched(self, send: Send, scope: Scope, request: _Request, *, of_adapter: bool) -> Send:
        """Add the version to the answer. Let nothing out that a version may have generated which is not wanted.

        ``of_adapter``: a version of an adapter is wanted. Then the headers wait for the first part of the body, because a server
        may send them before it looks the adapter's name up (SGLang does).
        """
        begun, refused, wanted, label = False, False, request.wanted, request.label
        start: Message | None = None
        adapters: Collection[str] = ()

        async def watched(message: Message) -> None:
            nonlocal adapters, begun, refused, start
            if refused:
                return
            if of_adapter and start is None and message["type"] == "http.response.start":
                start = message
                return
            now = self._label()
            if request.contradiction and not begun:
                refused = True
                await _conflict(send, scope, request.contradiction, now)
                return
            if not begun:  # an answer that has begun keeps its adapter, even if another is published
                adapters = list(self._adapters())
            # While an update runs, what comes may be of the version before, which is well for all that do not want exactly one.
            if (wanted.exact or now is not None) and not wanted.allows(now, adapters):
                if begun:
                    raise VersionError(f"the answer was cut off: it must be of {wanted.shown}, and an update has begun")
                refused = True
                await _refuse(send, scope, wanted, now, adapters)
                return
            waiting, begun = [] if begun or start is None else [start], True
            for each in (*waiting, message):
                if each["type"] in ("http.response.start", "websocket.accept"):
                    headers = [(name, value) for name, value in each.get("headers", ()) if name.lower() != _EXACT]
                    known = ", ".join(dict.fromkeys(filter(None, (label, now))))
                    each["headers"] = [*headers, (_EXACT, known.encode())] if known else headers
                await send(each)

        return watched


def _wanted(headers: Iterable[tuple[bytes, bytes]]) -> _Demands:
    """Raises ``VersionError`` for a name that is no version."""
    demands: dict[bytes, list[str]] = {_EXACT: [], _LEAST: []}
    for name, value in _named(headers):
        text = value.strip(b" \t").decode("latin-1")
        if _LABEL.fullmatch(text) is None:
            raise VersionError(f"{readable(text, 80)!r} in {name.decode()} is no version: write it as run@7")
        demands[name].append(text)
    return _Demands(tuple(demands[_EXACT]), tuple(demands[_LEAST]))


def _named(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name in (_EXACT, _LEAST):
            yield name, value
        elif name == b"tracestate":
            for member in value.split(b","):
                key, _, text = member.strip().partition(b"=")
                if (meant := _MEMBERS.get(key.decode("latin-1"))) is not None:
                    yield meant, text


async def _refuse(send: Send, scope: Scope, wanted: _Demands, label: str | None, adapters: Collection[str]) -> None:
    has = ", ".join([*filter(None, [label]), *wanted.among(adapters)])
    await _conflict(send, scope, f"the request asks for {wanted.shown}, and this server has {has or _NONE}", label)


async def _conflict(send: Send, scope: Scope, message: str, label: str | None) -> None:
    await _answer(send, scope, HTTPStatus.CONFLICT, _error(HTTPStatus.CONFLICT, message, label), label)


def _error(status: HTTPStatus, message: str, label: str | None) -> dict[str, object]:
    """The body of a refusal, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "VersionError", "param": None, "code": int(status)}, "version": label}


async def _answer(send: Send, scope: Scope, status: HTTPStatus, body: dict[str, object], label: str | None) -> None:
    prefix, content = "websocket." if scope["type"] == "websocket" else "", json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    headers += [(b"content-length", str(len(content)).encode())] + ([(_EXACT, label.encode())] if label else [])
    await send({"type": f"{prefix}http.response.start", "status": int(status), "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": b"" if scope.get("method") == "HEAD" else content})
