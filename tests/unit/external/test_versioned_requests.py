"""Requests that name a version: what is refused before the engine sees it, what is cut off, and what answers say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from weightsync.errors import VersionError
from weightsync.external import VersionedRequests
from weightsync.external.versioned_requests import HEALTH_PATH, check_adapter
from weightsync.model import Version

VERSION = Version("run", 7, "ab" * 16, "cd" * 8)
App = Callable[[Any, Any, Any], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Server:
    """An application behind the middleware, and the label that it serves."""

    def __init__(self, label: object = "run@7", steps: Callable[[Server], Awaitable[None]] | None = None) -> None:
        self.label, self.asked = label, 0
        self.adapters = ["alice/math@2", "alice/math@10", "bob/code@7"]
        self._steps = steps
        self._asgi = VersionedRequests(self._app, lambda: self.label, lambda: self.adapters)  # type: ignore[arg-type,return-value]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        start = "websocket.accept" if scope["type"] == "websocket" else "http.response.start"
        await send({"type": start, "status": 200, "headers": [(b"x-other", b"1"), (b"X-Weightsync-Version", b"forged@1")]})
        for part in (b"a", b"b"):
            if self._steps is not None:
                await self._steps(self)
            await send({"type": "http.response.body", "body": part, "more_body": part == b"a"})

    def ask(self, headers: Headers | None = None, path: str = "/v1/completions", kind: str = "http") -> list[dict[str, Any]]:
        sent = self.sent = list[dict[str, Any]]()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            raise AssertionError("the body was read")

        scope = {"type": kind, "path": path, "headers": headers or [], "method": "POST"}
        asyncio.run(self._asgi(scope, receive, send))  # type: ignore[arg-type]
        return sent

    def status(self, *headers: tuple[str, str]) -> int:
        return int(self.ask([(name.lower().encode(), value.encode("latin-1")) for name, value in headers])[0]["status"])


@pytest.mark.parametrize(
    ("label", "header", "value", "status"),
    [
        ("run@7", "X-Weightsync-Min-Version", "run@7", 200),
        ("run@7", "X-Weightsync-Min-Version", "run@6", 200),
        ("run@7", "X-Weightsync-Min-Version", "run@8", 409),
        ("run@10", "X-Weightsync-Min-Version", "run@9", 200),  # numbers, not text
        ("run.2@3", "X-Weightsync-Min-Version", "run@7", 200),  # a later epoch
        ("run@7", "X-Weightsync-Min-Version", "run.2@3", 409),
        ("run@7", "X-Weightsync-Min-Version", "other@1", 409),
        ("run@7", "X-Weightsync-Version", "run@7", 200),
        ("run@7", "X-Weightsync-Version", "run@6", 409),
        ("run@7", "X-Weightsync-Version", "run@8", 409),
        ("run@7", "X-Weightsync-Version", "alice/math@10", 200),
        ("run@7", "X-Weightsync-Version", "alice/math@2", 409),  # its name alone means a later one
        ("run@7", "X-Weightsync-Version", "alice/math@7", 409),
        ("run@7", "X-Weightsync-Version", "eve/math@7", 409),
        (None, "X-Weightsync-Min-Version", "alice/math@9", 200),  # whatever the base is
        ("run@7", "X-Weightsync-Min-Version", "alice/math@11", 409),
        ("run@7", "X-Weightsync-Min-Version", "bob/code@10", 409),
        ("run@7", "tracestate", "weightsync-min=alice/math@9, weightsync=run@7", 200),
        ("run@7", "tracestate", "weightsync-min=alice/math@9, weightsync=run@8", 409),
        (None, "X-Weightsync-Min-Version", "run@0", 409),
        ("weightsync:none", "X-Weightsync-Min-Version", "run@0", 409),
        ("default", "X-Weightsync-Version", "default@1", 409),  # an engine's label of its own is no version
        (VERSION, "X-Weightsync-Version", "run@7", 200),
        ("run@7", "tracestate", "weightsync-min=run@8", 409),
        ("run@7", "tracestate", "vendor=1, weightsync-min=run@7,weightsync=run@7", 200),
        ("run@7", "tracestate", "vendor=run@9,weightsyncs=run@9,weightsync-mins=run@9", 200),
    ],
)
def test_a_request_gets_the_version_that_it_names_or_a_409(label: object, header: str, value: str, status: int) -> None:
    server = Server(label)
    assert server.status((header, value)) == status
    assert server.asked == (status == 200)


@pytest.mark.parametrize(
    "value",
    ["", "7", "run", "run@", "@7", "run@-1", "run@7x", "run @7", "run@" + "9" * 19, "r" * 300 + "@7", "rün@7", "run@٣"],
)
@pytest.mark.parametrize("header", ["X-Weightsync-Version", "X-Weightsync-Min-Version", "tracestate"])
def test_a_malformed_name_is_a_400(header: str, value: str) -> None:
    server = Server()
    name, text = header.lower().encode(), value.encode("utf-8")
    sent = server.ask([(name, b"weightsync=" + text if header == "tracestate" else text)])
    assert (sent[0]["status"], server.asked) == (400, 0)
    assert b"write it as run@7" in sent[1]["body"]


def test_every_one_of_several_demands_counts() -> None:
    least, exact = "X-Weightsync-Min-Version", "X-Weightsync-Version"
    assert Server().status((least, "run@6"), (least, "run@8")) == 409
    assert Server().status((least, "run@6"), (exact, "run@7")) == 200
    assert Server().status((least, "run@8"), (exact, "run@7")) == 409
    assert Server().status((least, "run@7"), ("tracestate", "weightsync-min=run@8")) == 409


def test_answers_say_what_was_served() -> None:
    server = Server()
    [start, *_] = server.ask()
    assert start["headers"] == [(b"x-other", b"1"), (b"x-weightsync-version", b"run@7")]  # no header of the application's
    refused = server.ask([(b"x-weightsync-min-version", b"run@8")])
    assert (b"x-weightsync-version", b"run@7") in refused[0]["headers"]
    assert b'"version": "run@7"' in refused[1]["body"]
    assert b"run@8 or later, and this server has run@7" in refused[1]["body"]
    assert Server(None).ask()[0]["headers"] == [(b"x-other", b"1")]


def test_an_answer_that_an_update_overtakes_names_both_versions() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        server.label = "run@8"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    server = Server()
    server._asgi = VersionedRequests(slow, served=lambda: server.label)  # type: ignore[arg-type,return-value]
    assert server.ask()[0]["headers"] == [(b"x-weightsync-version", b"run@7, run@8")]


@pytest.mark.parametrize("later", ["run@8", None])
def test_an_answer_of_exactly_one_version_holds_no_token_of_another(later: str | None) -> None:
    async def update(server: Server) -> None:
        server.label = later

    server = Server(steps=update)
    with pytest.raises(VersionError, match="cut off"):
        server.ask([(b"x-weightsync-version", b"run@7")])
    server = Server(steps=update)
    assert [message.get("body") for message in server.ask([(b"x-weightsync-min-version", b"run@7")])] == [None, b"a", b"b"]


def test_an_exact_request_that_waited_through_an_update_is_refused_instead_of_answered() -> None:
    async def waits(scope: Any, receive: Any, send: Any) -> None:
        server.label = "run@8"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"of another version"})

    server = Server()
    server._asgi = VersionedRequests(waits, served=lambda: server.label)  # type: ignore[arg-type,return-value]
    sent = server.ask([(b"x-weightsync-version", b"run@7")])
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 409 and b"this server has run@8" in sent[1]["body"]


@pytest.mark.parametrize("later", ["run@5", "other@9"])
def test_an_answer_is_never_of_an_earlier_version_than_asked_for_nor_of_another_run(later: str) -> None:
    """A replica that failed may be seeded with an older version from a store, and any may be updated from outside."""

    async def update(server: Server) -> None:
        server.label = later

    with pytest.raises(VersionError, match="cut off: it must be of run@7 or later"):
        Server(steps=update).ask([(b"x-weightsync-min-version", b"run@7")])

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        server.label = later
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"of another version"})

    server = Server()
    server._asgi = VersionedRequests(waits, served=lambda: server.label)  # type: ignore[arg-type,return-value]
    assert server.status(("X-Weightsync-Min-Version", "run@7")) == 409
    assert b"this server has" in server.sent[1]["body"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("label", ["run@7", None])
def test_an_exact_request_is_never_answered_by_a_newer_adapter_and_keeps_its_own(label: str | None, streams: bool) -> None:
    async def publish(server: Server) -> None:
        server.adapters.append("alice/math@11")

    async def later(server: Server) -> None:
        if server.sent:
            await publish(server)

    server = Server(label, steps=later)
    headers = [(b"x-weightsync-version", b"alice/math@10")]
    assert [message.get("body") for message in server.ask(headers)] == [None, b"a", b"b"], "its answer had begun"
    assert "alice/math@11" in server.adapters

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        if not streams:
            await publish(server)  # before the engine looked the name up
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if streams:  # SGLang begins a stream before it looks the name up, and waits in between while it is paused
            await publish(server)
        await send({"type": "http.response.body", "body": b"of another version"})

    server = Server(label)
    server._asgi = VersionedRequests(waits, lambda: server.label, lambda: server.adapters)  # type: ignore[arg-type,return-value]
    sent = server.ask(headers)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 409 and b"alice/math@11" in sent[1]["body"] and b"bob" not in sent[1]["body"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("header", "body", "status"),
    [
        ("X-Weightsync-Version: alice/math@10", "alice/math@10", 200),
        ("X-Weightsync-Version: alice/math@10", "alice/math@2", 409),
        ("X-Weightsync-Version: alice/math@10", "bob/code@7", 409),
        ("X-Weightsync-Version: alice/math@10", None, 409),
        ("X-Weightsync-Min-Version: alice/math@3", "alice/math@10", 200),
        ("X-Weightsync-Min-Version: alice/math@3", "alice/math@2", 409),
        ("X-Weightsync-Min-Version: alice/math@3", None, 409),
        ("X-Weightsync-Version: run@7", "alice/math@2", 200),
        ("X-Weightsync-Version: run@7", None, 200),
        ("X-Other: alice/math@10", "alice/math@2", 200),
    ],
)
def test_a_body_that_contradicts_the_headers_is_a_409(header: str, body: str | None, status: int, streams: bool) -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        if streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        code = 200
        try:
            await asyncio.create_task(looked_up())  # servers run requests in tasks
        except ValueError:
            code = 400
        if not streams:
            await send({"type": "http.response.start", "status": code, "headers": []})
        await send({"type": "http.response.body", "body": b"tokens" if code == 200 else b"an error"})

    async def looked_up() -> None:
        check_adapter(body)

    server = Server()
    server._asgi = VersionedRequests(answers, lambda: server.label, lambda: server.adapters)  # type: ignore[arg-type,return-value]
    name, _, value = header.partition(": ")
    assert server.status((name, value)) == status
    assert (server.sent[-1]["body"] == b"tokens") == (status == 200)
    if status == 409:
        assert f"and its body for {body or 'no adapter'}".encode() in server.sent[-1]["body"]
    check_adapter("alice/math@2")  # outside of any request


@pytest.mark.parametrize(("label", "status"), [("run@7", 200), (VERSION, 200), (None, 503), ("weightsync:none", 503)])
def test_the_readiness_route(label: object, status: int) -> None:
    server = Server(label)
    start, body = server.ask(path=HEALTH_PATH)
    assert (start["status"], server.asked) == (status, 0)
    assert (b'"version": "run@7"' if status == 200 else b'"version": null, "error": "no verified version') in body["body"]


def test_a_websocket_is_refused_too_and_other_scopes_pass() -> None:
    server = Server()
    sent = server.ask([(b"x-weightsync-min-version", b"run@8")], kind="websocket")
    assert (sent[0]["type"], sent[0]["status"], server.asked) == ("websocket.http.response.start", 409, 0)
    server.ask(kind="websocket", path=HEALTH_PATH)
    server.ask(kind="lifespan")
    assert server.asked == 2
