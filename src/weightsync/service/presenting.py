"""How HTTP clients of a coordinator show that they have the token: after it has proved the same, and without sending it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from http import HTTPStatus

import httpx

from weightsync.errors import AuthenticationError, ProtocolError
from weightsync.service.auth import token_for
from weightsync.service.proof import Claimant
from weightsync.service.settings import ClientSettings, Secret

__all__ = ["presenting"]

_PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


def presenting(settings: ClientSettings) -> httpx.Auth | None:
    """The ``auth`` of an httpx client of ``settings.coordinator``; ``None`` for a process that has no token for it.

    Raises what :func:`~weightsync.service.auth.find_token` raises.
    """
    token = token_for(settings)
    return None if token is None else _Presenting(token, settings)


class _Presenting(httpx.Auth):
    """Asks for a challenge before each request, and proves the token with it.

    Raises :class:`~weightsync.errors.AuthenticationError` for a coordinator that cannot prove that it has the token. If it could
    before, something else has taken its address for now, which is ``httpx.ConnectError``: the coordinator cannot be reached.
    """

    def __init__(self, token: Secret, settings: ClientSettings) -> None:
        self._token, self._settings = token, settings
        self._trusted = False

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See :class:`httpx.Auth`."""
        claimant = Claimant(self._token, self._settings.coordinator)
        answer = yield self._ask(claimant)
        answer.read()
        self._sign(request, claimant, answer)
        yield request

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """See :class:`httpx.Auth`."""
        claimant = Claimant(self._token, self._settings.coordinator)
        answer = yield self._ask(claimant)
        await answer.aread()
        self._sign(request, claimant, answer)
        yield request

    def _ask(self, claimant: Claimant) -> httpx.Request:
        timeout = httpx.Timeout(self._settings.connect_timeout).as_dict()
        return httpx.Request("GET", self._settings.coordinator.url + claimant.target, extensions={"timeout": timeout})

    def _sign(self, request: httpx.Request, claimant: Claimant, answer: httpx.Response) -> None:
        where = self._settings.coordinator
        if answer.status_code in _PASSING:
            raise httpx.ConnectError(f"HTTP {answer.status_code}", request=request)
        try:
            if not answer.is_success:
                raise ProtocolError(
                    f"what answers at {where} is not a weightsync coordinator, or one of an older release: it gives no challenge "
                    f"(HTTP {answer.status_code})"
                )
            target = f"{request.method} {request.url.raw_path.decode('ascii')}"
            request.headers["Authorization"] = claimant.authorization(answer.content, target)
        except (AuthenticationError, ProtocolError) as error:
            if self._trusted:
                raise httpx.ConnectError(str(error), request=request) from error
            raise
        self._trusted = True
