"""Rollout routes of the coordinator's service. Completions go to the trainer. Orders come from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from weightsync.config import Secret, ServerSettings
from weightsync.errors import ConfigurationError, DeadlineExceeded, MembershipError, from_wire
from weightsync.protocol.messages import decoding
from weightsync.server.app import EventStreams
from weightsync.server.openapi import Operation
from weightsync_callbacks.mailbox import Full, Mailbox, Post, Signal

FOLLOWER_HEADER = "Weightsync-Follower"
"""Header with the secret that a follower of a mailbox chose."""
_LASTING = ("/v1/rollouts/completions/events", "/v1/rollouts/orders/events", "/v1/rollouts/orders")
_BODY_BYTES = 64 << 20
_BODIES_BYTES = 256 << 20  # of all requests that are being received
_FOLLOWERS = 16
_WAITING = 256
_REMEMBERED = 1024
_DIGITS = 20  # of a number that fits in 64 bits

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
T = TypeVar("T")


class _TaskPost(msgspec.Struct, frozen=True):
    id: Name
    content: msgspec.Raw


class Completed(msgspec.Struct, frozen=True):
    """``POST /v1/rollouts/completions``: finished rollouts. The response holds their numbers."""

    completions: Annotated[tuple[_TaskPost, ...], msgspec.Meta(min_length=1, max_length=1 << 14)]


class Acknowledge(msgspec.Struct, frozen=True):
    """``POST /v1/rollouts/completions/acknowledge``: all messages up to this number were processed."""

    epoch: Name
    upto: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Order(msgspec.Struct, frozen=True):
    """``POST /v1/rollouts/orders``: the response follows when a rollout controller has executed the order. Idempotent by ``id``."""

    id: Name
    kind: Name
    body: dict[str, Any]
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Answered(msgspec.Struct, frozen=True):
    """``POST /v1/rollouts/orders/{number}``: outcome of an order. ``kind`` is the class name of an error; ``None`` for success."""

    epoch: Name
    message: str = ""
    kind: str | None = None


class Numbered(msgspec.Struct, frozen=True):
    """Numbers of the added messages, in order, and the mailbox's epoch."""

    epoch: str
    numbers: tuple[int, ...]


class Carried(msgspec.Struct, frozen=True):
    """Outcome of an order that was executed."""

    message: str


class Taken(msgspec.Struct, frozen=True):
    """Empty response of success."""


class _Followed:
    """A mailbox and its one follower, known by a secret that it chose: only that one reads and answers what the mailbox holds.

    The token alone would let every worker answer an order that was not carried out. The place is free when the follower's streams
    have ended; until another one takes it, a follower that reconnects is still the same.
    """

    def __init__(self) -> None:
        self.box = Mailbox()
        self._follower: Secret | None = None
        self._streams = 0

    def check(self, request: Request) -> None:
        """Raise ``HTTPException`` unless the follower asks."""
        if self._follower is None or _follower_of(request) != self._follower:
            raise HTTPException(HTTPStatus.FORBIDDEN, f"only the follower of this mailbox may do this ({FOLLOWER_HEADER})")

    def admit(self, request: Request) -> Secret:
        """Return the secret of one who may follow now. Raises ``HTTPException`` while another one does."""
        follower = _follower_of(request)
        if follower is None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"a follower names its own secret: {FOLLOWER_HEADER}")
        if self._streams and follower != self._follower:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "another process follows this mailbox; only one may at a time")
        return follower

    async def follow(self, follower: Secret, epoch: str, after: int) -> AsyncIterator[list[Signal]]:
        """Yield as :meth:`Mailbox.follow` does. Ends at once if another follower came first."""
        if self._streams and follower != self._follower:
            return
        self._follower = follower
        self._streams += 1
        try:
            async with aclosing(cast("AsyncGenerator[list[Signal], None]", self.box.follow(epoch, after))) as signals:
                async for batch in signals:
                    yield batch
        finally:
            self._streams -= 1


def _follower_of(request: Request) -> Secret | None:
    try:
        return Secret(request.headers.get(FOLLOWER_HEADER, ""))
    except ConfigurationError:
        return None


_BAD, _ABSENT = HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND
_POSTED = (_BAD, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_HELD = (HTTPStatus.FORBIDDEN, *_POSTED)
_MESSAGE: dict[str, Any] = {"answer": Any, "errors": (HTTPStatus.FORBIDDEN, _ABSENT), "query": (("epoch", str),)}
_FOLLOW: dict[str, Any] = {
    "answer": Signal, "media": "text/event-stream", "errors": (_BAD,), "query": (("epoch", str), ("after", int)),
}  # fmt: skip

_OPERATIONS = (
    Operation("post", "/v1/rollouts/completions", "Push finished rollouts.", Numbered, body=Completed, errors=_POSTED),
    Operation("get", "/v1/rollouts/completions/events", "Server-sent events: signals of waiting, then new completions.", **_FOLLOW),
    Operation("get", "/v1/rollouts/completions/{number}", "Get one finished rollout.", **_MESSAGE),
    Operation("post", "/v1/rollouts/completions/acknowledge", "Delete all up to a number.", Taken, body=Acknowledge, errors=_HELD),
    Operation(
        "post",
        "/v1/rollouts/orders",
        "Order rollout controllers to execute a command. Responds when one has.",
        Carried,
        body=Order,
        errors=(*_POSTED, _ABSENT, HTTPStatus.CONFLICT, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT),
    ),
    Operation("get", "/v1/rollouts/orders/events", "Server-sent events: a signal for each order.", **_FOLLOW),
    Operation("get", "/v1/rollouts/orders/{number}", "Get one order.", **_MESSAGE),
    Operation("post", "/v1/rollouts/orders/{number}", "Report an outcome.", Taken, body=Answered, errors=(*_HELD, _ABSENT)),
)


class RolloutBroker:
    """Both mailboxes as a :class:`~weightsync.server.mounts.Mount` of the coordinator's service or of another application."""

    operations = _OPERATIONS
    lasting = _LASTING

    def __init__(self, heartbeat: float) -> None:
        self._followed = {"completions": _Followed(), "orders": _Followed()}
        self._completions, self._orders = (followed.box for followed in self._followed.values())
        self._answers: dict[int, asyncio.Future[Answered]] = {}
        self._streams = EventStreams(_FOLLOWERS, heartbeat)
        self._receiving = 0
        self.routes: list[BaseRoute] = [
            Route("/v1/rollouts/completions", self._complete, methods=["POST"]),
            Route("/v1/rollouts/completions/acknowledge", self._acknowledge, methods=["POST"]),
            Route("/v1/rollouts/completions/events", self._follow(self._followed["completions"])),
            Route("/v1/rollouts/completions/{number}", self._fetch(self._followed["completions"])),
            Route("/v1/rollouts/orders", self._order, methods=["POST"]),
            Route("/v1/rollouts/orders/events", self._follow(self._followed["orders"])),
            Route("/v1/rollouts/orders/{number}", self._fetch(self._followed["orders"])),
            Route("/v1/rollouts/orders/{number}", self._answer, methods=["POST"]),
        ]

    def close(self) -> None:
        """End all streams and pending orders."""
        self._completions.close()
        self._orders.close()
        for answer in self._answers.values():
            answer.cancel()

    async def _complete(self, request: Request) -> Response:
        done = await self._body(request, Completed)
        try:
            numbers = self._completions.put([Post(completion.id, completion.content) for completion in done.completions])
        except Full as error:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None
        return _json(Numbered(self._completions.epoch, tuple(numbers)))

    async def _acknowledge(self, request: Request) -> Response:
        self._followed["completions"].check(request)
        upto = await self._body(request, Acknowledge)
        self._completions.acknowledge(upto.epoch, upto.upto)
        return _json(Taken())

    async def _order(self, request: Request) -> Response:
        order = await self._body(request, Order)
        if sum(not answer.done() for answer in self._answers.values()) >= _WAITING:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{_WAITING} orders are already pending")
        try:
            (number,) = self._orders.put([Post(order.id, msgspec.Raw(msgspec.json.encode(order)))])
        except Full as error:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None
        answer = self._answers.setdefault(number, asyncio.get_running_loop().create_future())
        await asyncio.wait([answer], timeout=order.timeout)
        if answer.cancelled():
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the coordinator is shutting down")
        if not answer.done():  # withdraw it, so that no controller executes it after its sender gave up
            why = f"no rollout controller executed {order.kind} within {order.timeout:g} s: is one connected to this coordinator?"
            self._resolve(number, answer, Answered(self._orders.epoch, why, DeadlineExceeded.__name__))
        outcome = answer.result()
        if outcome.kind is not None:
            raise from_wire(outcome.kind, outcome.message)
        return _json(Carried(outcome.message))

    async def _answer(self, request: Request) -> Response:
        self._followed["orders"].check(request)
        outcome = await self._body(request, Answered)
        number = _number(request)
        answer = self._answers.get(number) if outcome.epoch == self._orders.epoch else None
        if answer is None:
            raise MembershipError(f"order {number} does not exist")
        if not answer.done():  # otherwise a repeated outcome, whose sender lost our response, or a late one
            self._resolve(number, answer, outcome)
        return _json(Taken())

    async def _body(self, request: Request, kind: type[T]) -> T:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._receiving += len(chunk)
                if len(body) > _BODY_BYTES:
                    raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {_BODY_BYTES} bytes")
                if self._receiving > _BODIES_BYTES:
                    raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "too many large requests at one time; try again later")
        finally:
            self._receiving -= len(body)
        with decoding(f"not a {kind.__name__}", ConfigurationError):
            return msgspec.json.decode(body, type=kind)

    def _resolve(self, number: int, answer: asyncio.Future[Answered], outcome: Answered) -> None:
        answer.set_result(outcome)
        self._orders.withdraw(number)
        resolved = [known for known, answer in self._answers.items() if answer.done()]
        for known in resolved[: max(0, len(resolved) - _REMEMBERED)]:  # the others answer repeated orders
            del self._answers[known]

    def _fetch(self, followed: _Followed) -> Callable[[Request], Awaitable[Response]]:
        async def fetch(request: Request) -> Response:
            followed.check(request)
            content = followed.box.content(_number(request), request.query_params.get("epoch", ""))
            return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})

        return fetch

    def _follow(self, followed: _Followed) -> Callable[[Request], Awaitable[Response]]:
        async def follow(request: Request) -> Response:
            follower = followed.admit(request)
            after = request.query_params.get("after", "0")
            if not (after.isascii() and after.isdigit() and len(after) < _DIGITS):
                raise ConfigurationError(f"after={after!r} is not a number")
            epoch = request.query_params.get("epoch", "")
            return self._streams.respond(request, lambda: followed.follow(follower, epoch, int(after)), _signals)

        return follow


def _signals(signals: list[Signal]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(signal) + b"\n\n" for signal in signals)


def mount(settings: ServerSettings) -> RolloutBroker:
    """Make the broker that ``WEIGHTSYNC_MOUNTS=rollouts`` adds to a coordinator."""
    return RolloutBroker(settings.heartbeat)


def _number(request: Request) -> int:
    given = str(request.path_params["number"])
    # Python's int() accepts digits of other scripts, and raises ValueError for very long numbers.
    if not (given.isascii() and given.isdigit() and len(given) < _DIGITS):
        raise MembershipError(f"message {given[:_DIGITS]} does not exist")
    return int(given)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})
