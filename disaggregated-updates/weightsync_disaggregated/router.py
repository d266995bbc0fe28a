"""The HTTP routes of a disaggregated update, for any Starlette or FastAPI server to mount."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from weightsync.config import Secret
from weightsync.errors import WeightSyncError
from weightsync.protocol.tokens import matches
from weightsync.server.openapi import decode_body
from weightsync.server.problems import body_of
from weightsync_disaggregated import requests
from weightsync_disaggregated.weight_updates import WeightUpdates

_MAX_BODY = 64 << 20
T = TypeVar("T")


def weight_update_routes(updates: WeightUpdates, token: Secret | None) -> list[BaseRoute]:
    """Routes under LMDeploy's and SGLang's names, to be put into the server's own list of routes.

    ``token`` is asked of every request, as ``Authorization: Bearer``. ``None`` admits every client that reaches the server: only
    for one that checks by itself, or that only its own machine can reach. The answers are
    :class:`~weightsync_disaggregated.requests.Reply`, and ``UpdateState`` for ``GET /weight_update``.
    """

    def post(path: str, kind: type[T], run: Callable[[T], Awaitable[str]]) -> Route:
        async def handle(request: Request) -> str:
            return await run(await _body(request, kind))

        return Route(path, _answered(handle, token), methods=["POST"])

    async def state(request: Request) -> requests.UpdateState:
        return await updates.state()

    return [
        post("/init_weights_update_group", requests.InitGroupRequest, updates.init_group),
        post("/update_weights_from_distributed", requests.UpdateRequest, updates.update),
        post("/destroy_weights_update_group", requests.DestroyRequest, updates.destroy),
        post("/check_weight_update", requests.CheckRequest, updates.check),
        post("/begin_weight_update", requests.BeginRequest, updates.begin),
        post("/commit_weight_update", requests.CommitRequest, updates.commit),
        post("/end_weight_update", requests.EndRequest, lambda _: updates.end()),
        post("/abort_weight_update", requests.AbortRequest, lambda _: updates.abort()),
        Route("/weight_update", _answered(state, token)),
    ]


def _answered(
    handle: Callable[[Request], Awaitable[str | requests.UpdateState]], token: Secret | None
) -> Callable[[Request], Awaitable[Response]]:
    """Authentication before, and errors as answers after."""

    @functools.wraps(handle)
    async def endpoint(request: Request) -> Response:
        if token is not None and not matches(request.headers.get("authorization"), token):
            return _json(requests.Reply(False, "a bearer token is needed, and this is not it"), HTTPStatus.UNAUTHORIZED)
        try:
            done = await handle(request)
        except HTTPException as error:
            return _json(requests.Reply(False, error.detail), error.status_code)
        except WeightSyncError as error:
            return _json(requests.Reply(False, f"{type(error).__name__}: {error}"), HTTPStatus.BAD_REQUEST)
        return _json(requests.Reply(True, done) if isinstance(done, str) else done)

    return endpoint


async def _body(request: Request, kind: type[T]) -> T:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body must be JSON, and say so: Content-Type: application/json")
    return decode_body(await body_of(request, _MAX_BODY), kind, f"a {kind.__name__} request")


def _json(content: Any, status: int = HTTPStatus.OK) -> Response:  # noqa: ANN401 - any message
    headers = {"WWW-Authenticate": 'Bearer realm="weightsync"'} if status == HTTPStatus.UNAUTHORIZED else None
    return Response(msgspec.json.encode(content), status, headers, "application/json")
