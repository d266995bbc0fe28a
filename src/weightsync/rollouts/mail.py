"""Following and filling a coordinator's mailboxes, over connections that may be lost: rollout completions, and orders."""

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
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    ProtocolError,
    from_wire,
)
from weightsync.protocol.endpoint import reason, unreachable
from weightsync.protocol.messages import UNREADABLE
from weightsync.rollouts.mailbox import Signal
from weightsync.server.problems import Problem
from weightsync.server.watch import coordinator_http

__all__ = ["Backoff", "CompletionReceiver", "CompletionSender", "asked", "check", "followed"]

_log = logging.getLogger(__name__)
_BATCH = 1024
_BATCH_BYTES = 16 << 20
_MISSED = 3  # heartbeats without a byte
_SIGNAL = msgspec.json.Decoder(Signal)


class Backoff:
    """Longer and longer between attempts to reach a coordinator that is gone: 50 ms to 2 s."""

    def __init__(self) -> None:
        self._seconds = 0.05

    def reset(self) -> None:
        """It was reached."""
        self._seconds = 0.05

    async def rest(self, most: float = 2.0) -> None:
        """Wait before the next attempt, at most so long."""
        await asyncio.sleep(min(self._seconds, most))
        self._seconds = min(2 * self._seconds, 2.0)


def check(answer: httpx.Response, settings: ClientSettings) -> None:
    """Raise what the coordinator answered, if it is an error; ``httpx.HTTPStatusError`` for what is worth another attempt."""
    if answer.is_success:
        return
    try:
        problem = msgspec.json.decode(answer.content, type=Problem)
    except UNREADABLE:
        raise ProtocolError(f"what answers at {settings.coordinator} is not a coordinator (HTTP {answer.status_code})") from None
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise AuthenticationError(f"{settings.coordinator}: {problem.message}")
    if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE and problem.kind == "ServiceUnavailable":
        raise httpx.HTTPStatusError(problem.message, request=answer.request, response=answer)
    if answer.status_code == HTTPStatus.NOT_FOUND and problem.kind == "NotFound":
        raise ConfigurationError(
            f"the coordinator at {settings.coordinator} has no mailboxes for rollouts: start it with "
            "`weightsync serve --mount rollouts`, or with WEIGHTSYNC_MOUNTS=rollouts in its process"
        )
    raise from_wire(problem.kind, problem.message)


async def followed(http: httpx.AsyncClient, settings: ClientSettings, path: str) -> AsyncIterator[Signal]:
    """Each message's signal once, in order, for as long as this is iterated; a lost connection is made again.

    Raises :class:`~weightsync.errors.AuthenticationError` and what else the coordinator refuses for good.
    """
    epoch, last, again = "", 0, Backoff()
    timeout = httpx.Timeout(settings.timeouts.connect, read=_MISSED * settings.timeouts.heartbeat)
    while True:
        try:
            async with http.stream("GET", path, params={"epoch": epoch, "after": last}, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    check(answer, settings)
                async for line in answer.aiter_lines():
                    again.reset()
                    if not line.startswith("data: "):
                        continue
                    try:
                        signal = _SIGNAL.decode(line[6:])
                    except UNREADABLE as error:
                        raise ProtocolError(f"{settings.coordinator} sent a signal that is none: {error}") from None
                    if signal.epoch == epoch and signal.number <= last:
                        continue
                    epoch, last = signal.epoch, signal.number
                    yield signal
        except httpx.HTTPError as error:
            _log.info("%s%s broke off: %s", settings.coordinator, path, reason(error))
        await again.rest()


class CompletionSender:
    """Tells the trainer of finished rollouts. :meth:`send` never waits; what was sent is repeated until the coordinator has it.

    Made and used on one event loop; use it in an ``async with``, whose end waits until all is sent, at most ``flush_seconds``.
    """

    def __init__(self, settings: ClientSettings, flush_seconds: float = 10.0) -> None:
        self._settings, self._flush = settings, flush_seconds
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._some, self._none = asyncio.Event(), asyncio.Event()
        self._none.set()
        self._task = asyncio.create_task(self._run(), name="send completions")

    def send(self, value: object, name: str | None = None) -> str:
        """Push ``value`` (anything that msgspec turns into JSON) and return its id: ``name``, or a new one."""
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
    """Hears of finished rollouts: iterate it for signals, :meth:`fetch` what they stand for, :meth:`acknowledge` what is done with.

    A signal comes once, however often the connection is lost, and again to the next receiver until it is acknowledged. Use it in an
    ``async with``.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._http = coordinator_http(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    def __aiter__(self) -> AsyncIterator[Signal]:
        return followed(self._http, self._settings, "/v1/rollouts/completions/events")

    async def fetch(self, signal: Signal, timeout: float = 30.0) -> Any:  # noqa: ANN401 - any JSON
        """What was sent. Raises :class:`~weightsync.errors.MembershipError` if it is not there any more."""
        path = f"/v1/rollouts/completions/{signal.number}?epoch={signal.epoch}"
        return msgspec.json.decode((await asked(self._http, self._settings, "GET", path, b"", Deadline(timeout))).content)

    async def acknowledge(self, signal: Signal, timeout: float = 30.0) -> None:
        """This one and all before it were taken: they are not kept, and not told again."""
        body = msgspec.json.encode({"epoch": signal.epoch, "upto": signal.number})
        await asked(self._http, self._settings, "POST", "/v1/rollouts/completions/acknowledge", body, Deadline(timeout))


async def asked(
    http: httpx.AsyncClient,
    settings: ClientSettings,
    method: str,
    path: str,
    content: bytes,
    deadline: Deadline,
    patience: float = 0.0,
) -> httpx.Response:
    """The answer to a request that may be repeated, which it is while the coordinator cannot be reached, until the deadline.

    An answer that the coordinator itself gives at that deadline is waited for ``patience`` seconds longer. Raises
    :class:`~weightsync.errors.CoordinatorUnreachable` with the address, and what the coordinator answers.
    """
    again, why = Backoff(), "no answer"
    while True:
        try:
            left = deadline.remaining(path)
        except DeadlineExceeded:
            raise CoordinatorUnreachable(unreachable(settings, why)) from None
        try:
            timeout = httpx.Timeout(left + patience, connect=min(settings.timeouts.connect, left))
            answer = await http.request(method, path, content=content, timeout=timeout)
            check(answer, settings)
            return answer
        except httpx.HTTPError as error:
            why = reason(error)
        with contextlib.suppress(DeadlineExceeded):
            await again.rest(deadline.remaining(path))
