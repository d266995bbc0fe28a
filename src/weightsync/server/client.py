"""Asking a coordinator over HTTP: its status, a round, its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

import httpx
import msgspec

from weightsync.closing import Closeable
from weightsync.config import ClientSettings
from weightsync.coordinator.events import Event
from weightsync.coordinator.status import RankStatus, Status
from weightsync.errors import AuthenticationError, CoordinatorUnreachable, DeadlineExceeded, ProtocolError, from_wire
from weightsync.model import RoundTrace
from weightsync.protocol.endpoint import reason, tls_context, unreachable
from weightsync.protocol.messages import UNREADABLE, RoundResult, decoding
from weightsync.server.history import RoundRecord
from weightsync.server.openapi import Revocation, RoundRequest
from weightsync.server.presenting import presenting
from weightsync.server.problems import Problem

__all__ = ["Client"]

_GRACE = 10.0  # seconds that an answer may come later than the round's own deadline
_ROUND_SECONDS = 86400.0
_MISSED = 3  # heartbeats without a byte on the event stream
_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

T = TypeVar("T")


class Client(Closeable):
    """One coordinator over HTTP, for one thread. Close it, or use it in a ``with``.

    Every method raises :class:`~weightsync.errors.CoordinatorUnreachable` if no coordinator answers,
    :class:`~weightsync.errors.AuthenticationError` for a wrong token, the error that the coordinator names, and
    :class:`~weightsync.errors.ProtocolError` for an answer that no coordinator gives.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        context = tls_context(settings)
        self._http = httpx.Client(
            base_url=settings.coordinator.url,
            auth=presenting(settings),
            timeout=settings.timeouts.connect,
            verify=True if context is None else context,
            trust_env=False,  # settings.py is where the environment is read; a proxy must not stand in between
        )

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def status(self) -> Status:
        """Who serves which version."""
        return self._decode(self._request("GET", "/v1/status"), Status)

    def start_round(self, replicas: Sequence[str] | None = None, timeout: float | None = None) -> RoundResult:
        """Bring ``replicas`` (``None``: all that are behind) to the version in the trainer's regions; returns when it is over."""
        body = msgspec.json.encode(RoundRequest(None if replicas is None else tuple(replicas), timeout))
        patience = _ROUND_SECONDS if timeout is None else timeout + _GRACE
        return self._decode(self._request("POST", "/v1/rounds", body, patience), RoundResult)

    def rounds(self, count: int) -> tuple[RoundRecord, ...]:
        """The last ``count`` rounds, also those of earlier coordinators; newest last."""
        return self._decode(self._request("GET", f"/v1/rounds?last={count}"), tuple[RoundRecord, ...])

    def trace(self, number: int | None = None) -> RoundTrace:
        """What every process did in round ``number`` of this coordinator; ``None``: in the last one."""
        return self._decode(self._request("GET", "/v1/trace" if number is None else f"/v1/trace?round={number}"), RoundTrace)

    def revoke(self, member: str) -> RankStatus:
        """Close the connection of the rank ``member`` (``trainer/0``), and refuse its credential; returns who that was."""
        return self._decode(self._request("POST", "/v1/revocations", msgspec.json.encode(Revocation(member))), RankStatus)

    @contextmanager
    def events(self) -> Iterator[Iterator[Event]]:
        """The coordinator's events from now on, until it ends or the ``with`` is left."""
        timeout = httpx.Timeout(self._settings.timeouts.connect, read=_MISSED * self._settings.timeouts.heartbeat)
        with self._mapped(), self._http.stream("GET", "/v1/events", timeout=timeout) as answer:
            if not answer.is_success:
                answer.read()
                self._check(answer)
            yield self._parse(answer)

    def _parse(self, answer: httpx.Response) -> Iterator[Event]:
        with self._mapped():
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    with decoding(f"{self._settings.coordinator} sent an invalid event"):
                        event = _EVENT.decode(line[6:])
                    yield event

    def _request(self, method: str, path: str, content: bytes | None = None, patience: float | None = None) -> httpx.Response:
        timeout = httpx.Timeout(self._settings.timeouts.connect, read=patience or self._settings.timeouts.connect)
        with self._mapped():
            answer = self._http.request(method, path, content=content, timeout=timeout)
        self._check(answer)
        return answer

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except httpx.ReadTimeout:
            raise DeadlineExceeded(f"the coordinator at {self._settings.coordinator} did not answer in time") from None
        except httpx.HTTPError as error:
            raise CoordinatorUnreachable(unreachable(self._settings, reason(error))) from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            problem = msgspec.json.decode(answer.content, type=Problem)
        except UNREADABLE:
            raise ProtocolError(
                f"what answers at {self._settings.coordinator} is not a weightsync coordinator (HTTP {answer.status_code})"
            ) from None
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise AuthenticationError(f"{self._settings.coordinator}: {problem.message}")
        raise from_wire(problem.kind, problem.message)

    def _decode(self, answer: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except UNREADABLE as error:
            wanted = getattr(kind, "__name__", kind)
            raise ProtocolError(
                f"{self._settings.coordinator} answered something else than a {wanted} ({error}): is it the same weightsync?"
            ) from None
