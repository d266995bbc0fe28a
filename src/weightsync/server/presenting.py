"""How HTTP clients of a coordinator show that they have the token: after it has proved the same, and without sending it."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncGenerator, Generator
from http import HTTPStatus

import httpx

from weightsync.config import ClientSettings, Secret
from weightsync.errors import AuthenticationError, ProtocolError
from weightsync.protocol.endpoint import TRANSIENT_STATUS, no_challenge
from weightsync.protocol.proof import ANSWER_HEADER, Claimant
from weightsync.protocol.tokens import token_for

__all__ = ["presenting"]


def presenting(settings: ClientSettings, trusted_seconds: float = 0.0) -> httpx.Auth | None:
    """The ``auth`` of an httpx client of ``settings.coordinator``; ``None`` for a process that has no token for it.

    For ``trusted_seconds`` after the coordinator's last proof a request needs no new challenge, for clients that ask often: if
    something else takes its address meanwhile, that gets the request, and its answer is not believed.

    Raises what :func:`~weightsync.protocol.tokens.find_token` raises.
    """
    token = token_for(settings)
    return None if token is None else _Presenting(token, settings, trusted_seconds)


class _Presenting(httpx.Auth):
    """Asks for a challenge, proves the token with each request, and looks for the coordinator's proof in each answer.

    Raises :class:`~weightsync.errors.AuthenticationError` for a coordinator that cannot prove that it has the token. If it could
    before, something else has taken its address for now, which is ``httpx.ConnectError``: the coordinator cannot be reached.
    """

    def __init__(self, token: Secret, settings: ClientSettings, trusted_seconds: float) -> None:
        self._token, self._settings, self._trusted = token, settings, trusted_seconds
        self._claimant: Claimant | None = None
        self._proved_at: float | None = None

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See :class:`httpx.Auth`."""
        flow = self._flow(request)
        asked = next(flow)
        while True:
            answer = yield asked
            if asked is not request:
                answer.read()
            try:
                asked = flow.send(answer)
            except StopIteration:
                return

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """See :class:`httpx.Auth`."""
        flow = self._flow(request)
        asked = next(flow)
        while True:
            answer = yield asked
            if asked is not request:
                await answer.aread()
            try:
                asked = flow.send(answer)
            except StopIteration:
                return

    def _flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Challenges, whose answers are read, and ``request`` itself, whose answer may be a stream."""
        while True:
            claimant, fresh = self._held(), False
            if claimant is None:
                claimant, fresh = Claimant(self._token, self._settings.coordinator), True
                self._accept(claimant, (yield self._challenge(claimant)), request)
            target = f"{request.method} {request.url.raw_path.decode('ascii')}"
            request.headers["Authorization"], expected = claimant.authorization(target)
            answer = yield request
            if hmac.compare_digest(answer.headers.get(ANSWER_HEADER, "").encode(), expected.encode()):
                self._proved_at = time.monotonic()
                return
            self._claimant = None
            if answer.status_code == HTTPStatus.UNAUTHORIZED and not fresh:
                continue  # restarted, or too late
            if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status_code != HTTPStatus.UNAUTHORIZED:
                raise httpx.ConnectError("what answers there cannot prove that it is the coordinator", request=request)
            return

    def _held(self) -> Claimant | None:
        """A challenge that is good for another request, to a coordinator that has just proved itself."""
        if self._claimant is None or self._proved_at is None or self._claimant.spent:
            return None
        return self._claimant if time.monotonic() - self._proved_at < self._trusted else None

    def _challenge(self, claimant: Claimant) -> httpx.Request:
        timeout = httpx.Timeout(self._settings.timeouts.connect).as_dict()
        return httpx.Request("GET", self._settings.coordinator.url + claimant.target, extensions={"timeout": timeout})

    def _accept(self, claimant: Claimant, answer: httpx.Response, request: httpx.Request) -> None:
        if answer.status_code in TRANSIENT_STATUS:
            raise httpx.ConnectError(f"HTTP {answer.status_code}", request=request)
        try:
            if not answer.is_success:
                raise ProtocolError(no_challenge(self._settings, answer.status_code))
            claimant.accept(answer.content)
        except (AuthenticationError, ProtocolError) as error:
            if self._proved_at is not None:
                raise httpx.ConnectError(str(error), request=request) from error
            raise
        self._claimant, self._proved_at = claimant, time.monotonic()
