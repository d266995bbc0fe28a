"""vLLM's control routes for a vLLM that has no HTTP server: served on loopback, inside the process that owns the engine."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self, get_args

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightsync.engines.vllm.controls import INSTALL
from weightsync.model import PauseMode

__all__ = ["Front", "Owner"]

_STOP_SECONDS = 10.0

_Answer = dict[str, object]


class Owner(Protocol):
    """Whoever holds the engine object; each call ends when it is done."""

    async def pause(self, mode: PauseMode) -> None:
        """No step runs when this returns."""
        ...

    async def install(self) -> None:
        """Every worker loads what it has staged."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached keys and values, and say whether that worked."""
        ...

    async def label(self, version: str) -> None:
        """Name the weights."""
        ...

    async def resume(self) -> None:
        """Generate again."""
        ...


class _NewVersion(msgspec.Struct):
    new_version: str


class _Called(msgspec.Struct):
    method: str


class Front:
    """Serves an :class:`Owner` from a thread of its own, to who knows :attr:`token`. Close it, or use it in a ``with``."""

    def __init__(self, owner: Owner) -> None:
        self.token = secrets.token_urlsafe(32)
        self._owner = owner
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        routes: dict[str, Callable[[Request], Awaitable[_Answer]]] = {
            "/pause": self._pause,
            "/collective_rpc": self._install,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._label,
            "/resume": self._resume,
        }
        app = Starlette(routes=[Route(path, self._guarded(answer), methods=["POST"]) for path, answer in routes.items()])
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="weightsync-vllm-front", daemon=True
        )
        self._thread.start()  # requests wait in the listener's queue until the server takes them

    def _guarded(self, answer: Callable[[Request], Awaitable[_Answer]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return _json({"error": "this is not for you"}, HTTPStatus.UNAUTHORIZED)
            try:
                return _json(await answer(request))
            except Exception as error:  # noqa: BLE001 - the asker's to see, as vLLM's own routes do
                return _json({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

        return endpoint

    async def _pause(self, request: Request) -> _Answer:
        mode = request.query_params.get("mode", "abort")
        for known in get_args(PauseMode):
            if mode == known:
                await self._owner.pause(known)
                return {"status": "paused"}
        raise ValueError(f"unknown mode {mode!r}")

    async def _install(self, request: Request) -> _Answer:
        wish = msgspec.json.decode(await request.body(), type=_Called)
        if wish.method != INSTALL:
            raise ValueError(f"workers are called for {INSTALL} alone, not for {wish.method!r}")
        await self._owner.install()
        return {}

    async def _reset(self, request: Request) -> _Answer:
        return {"success": await self._owner.reset_prefix_cache()}

    async def _label(self, request: Request) -> _Answer:
        wish = msgspec.json.decode(await request.body(), type=_NewVersion)
        await self._owner.label(wish.new_version)
        return {"success": True}

    async def _resume(self, request: Request) -> _Answer:
        await self._owner.resume()
        return {}

    def close(self) -> None:
        """Stop serving. Safe twice."""
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _json(content: _Answer, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
