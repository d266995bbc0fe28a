"""Asking a coordinator over HTTP: its status, a round, its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec

from weightsync.closing import Closeable
from weightsync.config import ClientSettings, Secret
from weightsync.coordinator.events import Event
from weightsync.coordinator.status import RankStatus, Status
from weightsync.errors import CoordinatorUnreachable, DeadlineExceeded
from weightsync.model import RoundTrace
from weightsync.protocol.endpoint import reason, unreachable
from weightsync.protocol.messages import RoundResult
from weightsync.server.history import RoundRecord
from weightsync.server.http_client import EventReader, blocking_http, check, decoded, event_in, event_timeout
from weightsync.server.openapi import Revocation, RoundRequest
from weightsync.server.served import MOST_SECONDS, SERVED_PATH, Served

T = TypeVar("T")

_GRACE = 10.0  # seconds that an answer may come later than the round's own deadline
_ROUND_SECONDS = 86400.0


class Client(Closeable):
    """One coordinator over HTTP, for one thread. Close it, or use it in a ``with``.

    :meth:`start_round` and :meth:`revoke` are for operators: ``operator`` is their secret (:func:`.tokens.operator_secret`). It
    admits to the rest, too, and is used for that where this process has no token.

    Every method raises :class:`~weightsync.errors.CoordinatorUnreachable` if no coordinator answers,
    :class:`~weightsync.errors.AuthenticationError` for a wrong token, the error that the coordinator names, and
    :class:`~weightsync.errors.ProtocolError` for an answer that no coordinator gives.
    """

    def __init__(self, settings: ClientSettings, operator: Secret | None = None) -> None:
        self._settings = settings
        self._http = blocking_http(settings, operator)

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def status(self) -> Status:
        """Who serves which version."""
        return self._request(Status, "GET", "/v1/status")

    def served(self, seconds: float) -> Served:
        """Tensors that the replicas hold. Waits up to ``seconds`` for the first replica."""
        asked = min(max(1, round(seconds)), MOST_SECONDS)
        return self._request(Served, "GET", f"{SERVED_PATH}?timeout={asked}", seconds=asked + _GRACE)

    def start_round(self, replicas: Sequence[str] | None = None, timeout: float | None = None) -> RoundResult:
        """Bring ``replicas`` (``None``: all that are behind) to the version in the trainer's regions; returns when it is over.

        For operators.
        """
        body = msgspec.json.encode(RoundRequest(None if replicas is None else tuple(replicas), timeout))
        seconds = _ROUND_SECONDS if timeout is None else timeout + _GRACE
        return self._request(RoundResult, "POST", "/v1/rounds", body, seconds)

    def rounds(self, count: int) -> tuple[RoundRecord, ...]:
        """The last ``count`` rounds, also those of earlier coordinators; newest last."""
        return self._request(tuple[RoundRecord, ...], "GET", f"/v1/rounds?last={count}")

    def trace(self, number: int | None = None) -> RoundTrace:
        """What every process did in round ``number`` of this coordinator; ``None``: in the last one."""
        return self._request(RoundTrace, "GET", "/v1/trace" if number is None else f"/v1/trace?round={number}")

    def revoke(self, member: str) -> RankStatus:
        """Close the connection of the rank ``member`` (``trainer/0``), and refuse its credential; returns who that was.

        For operators.
        """
        return self._request(RankStatus, "POST", "/v1/revocations", msgspec.json.encode(Revocation(member)))

    @contextmanager
    def events(self) -> Iterator[Iterator[Event]]:
        """The coordinator's events from now on, until it ends or the ``with`` is left."""
        with self._mapped(), self._http.stream("GET", "/v1/events", timeout=event_timeout(self._settings)) as answer:
            if not answer.is_success:
                answer.read()
                check(answer, self._settings)
            yield self._parse(answer)

    def _parse(self, answer: httpx.Response) -> Iterator[Event]:
        reader = EventReader(self._settings.coordinator)
        with self._mapped():
            for part in answer.iter_bytes():
                for data in reader.feed(part):
                    yield event_in(data, self._settings)

    def _request(self, kind: type[T], method: str, path: str, content: bytes | None = None, seconds: float | None = None) -> T:
        timeout = httpx.Timeout(self._settings.timeouts.connect, read=seconds or self._settings.timeouts.connect)
        with self._mapped():
            answer = self._http.request(method, path, content=content, timeout=timeout)
        check(answer, self._settings)
        return decoded(answer, kind, self._settings)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except httpx.ReadTimeout:
            raise DeadlineExceeded(f"the coordinator at {self._settings.coordinator} did not answer in time") from None
        except httpx.HTTPError as error:
            raise CoordinatorUnreachable(unreachable(self._settings, reason(error))) from None
