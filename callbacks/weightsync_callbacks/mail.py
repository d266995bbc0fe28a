"""Clients of a coordinator's mailboxes for rollout completions and orders. They reconnect after a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator
from http import HTTPStatus
from itertools import islice
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, DeadlineExceeded
from weightsync.protocol.endpoint import reason, unreachable
from weightsync.protocol.messages import decoding
from weightsync.server import http_client
from weightsync.server.http_client import Backoff, coordinator_http, event_data, event_timeout, problem_in
from weightsync_callbacks.broker import FOLLOWER_HEADER
from weightsync_callbacks.mailbox import Signal

_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_BATCH = 1024
_BATCH_BYTES = 16 << 20
_SIGNAL = msgspec.json.Decoder(Signal)


def check(answer: httpx.Response, settings: ClientSettings) -> None:
    """Raise the error in the coordinator's response, if there is one.

    Raises:
        httpx.HTTPStatusError: The request may be repeated.
        ProtocolError: The response is not a coordinator's.
        AuthenticationError: The coordinator rejects the token.
        ConfigurationError: The coordinator has no mailboxes.
        WeightSyncError: The error that the coordinator reported.
    """
    if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE and problem_in(answer, settings).kind == "ServiceUnavailable":
        raise httpx.HTTPStatusError(problem_in(answer, settings).message, request=answer.request, response=answer)
    if answer.status_code == HTTPStatus.NOT_FOUND and problem_in(answer, settings).kind == "NotFound":
        raise ConfigurationError(
            f"the coordinator at {settings.coordinator} has no mailboxes for rollouts: start it with "
            "`weightsync serve --mount rollouts`, or with WEIGHTSYNC_MOUNTS=rollouts in its process"
        )
    http_client.check(answer, settings)


def follower_http(settings: ClientSettings) -> httpx.AsyncClient:
    """Connections of the one follower of a mailbox, with its secret. Another one is refused as long as this one follows."""
    http = coordinator_http(settings)
    http.headers[FOLLOWER_HEADER] = uuid.uuid4().hex
    return http


async def follow_signals(http: httpx.AsyncClient, settings: ClientSettings, path: str) -> AsyncIterator[Signal]:
    """Yield the signal of each message once, in order, without end. Reconnects after a lost connection.

    Raises:
        AuthenticationError: The coordinator rejects the token.
        ProtocolError: The coordinator sent an unreadable signal.
        WeightSyncError: The coordinator rejects the request permanently.
    """
    epoch, last, again, refused = "", 0, Backoff(), ""
    timeout = event_timeout(settings)
    while True:
        try:
            async with http.stream("GET", path, params={"epoch": epoch, "after": last}, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    check(answer, settings)
                again.reset()
                async for data in event_data(answer, settings.coordinator):
                    with decoding(f"{settings.coordinator} sent an unreadable signal"):
                        signal = _SIGNAL.decode(data)
                    if signal.epoch == epoch and signal.number <= last:
                        continue
                    epoch, last = signal.epoch, signal.number
                    yield signal
        except httpx.HTTPError as error:
            level = logging.WARNING if isinstance(error, httpx.HTTPStatusError) and reason(error) != refused else logging.INFO
            refused = reason(error)
            _log.log(level, "not connected to %s%s: %s", settings.coordinator, path, refused)
        await again.rest()


class CompletionSender:
    """Sends finished rollouts to the trainer. :meth:`send` does not wait. Requests are repeated until the coordinator has them.

    Not thread-safe: make and use it on one event loop, in an ``async with``. Its end waits until all completions are sent, at
    most ``flush_seconds``.
    """

    def __init__(self, settings: ClientSettings, flush_seconds: float = 10.0) -> None:
        self._settings, self._flush = settings, flush_seconds
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._some, self._none = asyncio.Event(), asyncio.Event()
        self._none.set()
        self._task = asyncio.create_task(self._run(), name="send completions")

    def send(self, value: object, name: str | None = None) -> str:
        """Queue ``value`` (anything that msgspec can encode as JSON) and return its id: ``name``, or a new one."""
        if self._task.done():
            self._task.result()
        name = name or uuid.uuid4().hex
        self._waiting.append((name, msgspec.json.encode(value)))
        self._none.clear()
        self._some.set()
        return name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        flushed = asyncio.ensure_future(self._none.wait())
        try:
            if kind is None:
                await asyncio.wait([flushed, self._task], timeout=self._flush, return_when=asyncio.FIRST_COMPLETED)
        finally:
            flushed.cancel()
            self._task.cancel()
            ended = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if kind is None and isinstance(ended, Exception):
            raise ended
        if kind is None and self._waiting:
            raise CoordinatorUnreachable(unreachable(self._settings, f"{len(self._waiting)} completions could not be sent"))

    async def _run(self) -> None:
        again = Backoff()
        async with coordinator_http(self._settings) as http:
            while True:
                await self._some.wait()
                count, size = 0, 0
                for _, content in self._waiting:
                    if count == _BATCH or (count and size + len(content) > _BATCH_BYTES):
                        break
                    count, size = count + 1, size + len(content)
                posts = [{"id": name, "content": msgspec.Raw(content)} for name, content in islice(self._waiting, count)]
                try:
                    check(
                        await http.post("/v1/rollouts/completions", content=msgspec.json.encode({"completions": posts})),
                        self._settings,
                    )
                except httpx.HTTPError as error:
                    _log.info("%d completions not sent yet: %s", len(self._waiting), reason(error))
                    await again.rest()
                    continue
                again.reset()
                for _ in range(count):
                    self._waiting.popleft()
                if not self._waiting:
                    self._some.clear()
                    self._none.set()


class CompletionReceiver:
    """Receives finished rollouts: iterate it for signals, :meth:`fetch` their contents, and :meth:`acknowledge` processed ones.

    A receiver gets each signal once, however often the connection is lost. The next receiver gets all unacknowledged signals
    again. Use it in an ``async with``.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._http = follower_http(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    def __aiter__(self) -> AsyncIterator[Signal]:
        return follow_signals(self._http, self._settings, "/v1/rollouts/completions/events")

    async def fetch(self, signal: Signal, timeout: float = 30.0) -> Any:  # noqa: ANN401 - any JSON
        """Return the content of a message, as decoded JSON.

        Raises:
            MembershipError: The message was acknowledged or lost in a restart of the coordinator.
            CoordinatorUnreachable: The coordinator did not answer within ``timeout`` seconds.
        """
        path = f"/v1/rollouts/completions/{signal.number}?epoch={signal.epoch}"
        return msgspec.json.decode((await request_until(self._http, self._settings, "GET", path, b"", Deadline(timeout))).content)

    async def acknowledge(self, signal: Signal, timeout: float = 30.0) -> None:
        """Acknowledge this message and all before it. The coordinator deletes them."""
        body = msgspec.json.encode({"epoch": signal.epoch, "upto": signal.number})
        await request_until(self._http, self._settings, "POST", "/v1/rollouts/completions/acknowledge", body, Deadline(timeout))


async def request_until(
    http: httpx.AsyncClient,
    settings: ClientSettings,
    method: str,
    path: str,
    content: bytes,
    deadline: Deadline,
    grace: float = 0.0,
) -> httpx.Response:
    """Send an idempotent request and return the response. Repeat it while the coordinator is unreachable, until the deadline.

    Args:
        http: The client.
        settings: Address of the coordinator, and timeouts.
        method: HTTP method.
        path: Path and query.
        content: Body.
        deadline: Deadline of all attempts.
        grace: Seconds to wait beyond the deadline for a response that the coordinator sends at the deadline.

    Raises:
        CoordinatorUnreachable: The coordinator did not answer. The message names its address.
        WeightSyncError: The error that the coordinator reported (:func:`check`).
    """
    again, why = Backoff(), "no answer"
    while True:
        try:
            left = deadline.remaining(path)
        except DeadlineExceeded:
            raise CoordinatorUnreachable(unreachable(settings, why)) from None
        try:
            timeout = httpx.Timeout(left + grace, connect=min(settings.timeouts.connect, left))
            answer = await http.request(method, path, content=content, timeout=timeout)
            check(answer, settings)
            return answer
        except httpx.HTTPError as error:
            why = reason(error)
        with contextlib.suppress(DeadlineExceeded):
            await again.rest(deadline.remaining(path))
