"""Errors as HTTP: one table from weightsync's errors to status codes, one shape of body, and the way back."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weightsync import errors
from weightsync.errors import WeightSyncError, to_wire

_ERRORS: dict[HTTPStatus, tuple[type[WeightSyncError], ...]] = {
    HTTPStatus.BAD_REQUEST: (errors.ConfigurationError, errors.ProtocolError),
    HTTPStatus.UNAUTHORIZED: (errors.AuthenticationError,),
    HTTPStatus.NOT_FOUND: (errors.MembershipError,),
    HTTPStatus.CONFLICT: (
        errors.ManifestMismatch, errors.LayoutError, errors.PlanMismatch, errors.VersionError, errors.StaleSource, errors.Aborted,
    ),
    HTTPStatus.BAD_GATEWAY: (
        errors.LoadError, errors.VerificationError, errors.PeerLost, errors.BroadcastBroken, errors.RoundFailed,
        errors.TransportError,
    ),
    HTTPStatus.SERVICE_UNAVAILABLE: (errors.CoordinatorUnreachable, errors.TransportUnavailable),
    HTTPStatus.GATEWAY_TIMEOUT: (errors.DeadlineExceeded,),
    HTTPStatus.INSUFFICIENT_STORAGE: (errors.SharedMemoryTooSmall,),
    HTTPStatus.INTERNAL_SERVER_ERROR: (errors.WeightSyncError,),
}  # fmt: skip
STATUS = {kind: status for status, kinds in _ERRORS.items() for kind in kinds}
"""The status of each error. An error that is not here has the status of its nearest base; a test keeps the table complete."""


class Problem(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success. ``kind`` is an error's class name."""

    kind: str
    message: str


def status_of(error: BaseException) -> HTTPStatus:
    """The status code that stands for ``error``."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)


def problem(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An answer with a :class:`Problem`; 401 says how to authenticate."""
    headers = dict(headers or {})
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="weightsync"'
    body = msgspec.json.encode(Problem(kind, message))
    return Response(body, status_code=status, media_type="application/problem+json", headers=headers)


async def body_of(request: Request, most: int) -> bytes:
    """Return the body of a request. Of one with more than ``most`` bytes no more is read: raises ``HTTPException``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {most} bytes")
    return bytes(body)


def problem_of(error: BaseException) -> Response:
    """The answer that stands for ``error``."""
    return problem(status_of(error), *to_wire(error))
