"""vLLM's HTTP server with :class:`~weightsync.external.versioned_requests.VersionedRequests` around it."""

from __future__ import annotations

import sys
from typing import Any

from weightsync.engines.vllm import BACKEND
from weightsync.engines.wrapped_methods import wrap_once

_LABEL, _LORAS = "_weightsync_label", "_weightsync_loras"
_BUILDERS = (
    "vllm.entrypoints.launchers.app", "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server",
    "__main__",
)  # fmt: skip
"""Modules that hold vLLM's ``build_app`` under this name: those that are imported, in any release."""


def keep_label(kind: Any) -> None:  # noqa: ANN401 - vLLM's class AsyncLLM
    """Make engines of class ``kind`` keep the label of their weights where their server finds it, and none while it changes.

    Idempotent.
    """

    async def update_weight_version(update: Any, self: Any, new_version: str) -> None:  # noqa: ANN401 - vLLM's
        setattr(self, _LABEL, None)
        await update(self, new_version)
        setattr(self, _LABEL, new_version)

    wrap_once(kind, "update_weight_version", update_weight_version)  # vLLM 0.25 has no labels for weights


def add_to_servers() -> None:
    """Put the middleware around every HTTP server that this process builds from now on, if its engine uses weightsync. Idempotent.

    A server that was attached by its URL gets its labels by vLLM's own route.
    """
    for name in _BUILDERS:
        module: Any = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.name.startswith("vllm."):
            wrap_once(module, "build_app", _build_versioned)


def uses_backend(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether an engine was started with weightsync's backend."""
    return getattr(getattr(vllm_config, "weight_transfer_config", None), "backend", None) == BACKEND


def _build_versioned(build: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
    from weightsync.external.versioned_requests import VersionedRequests

    app = build(*args, **kwargs)
    # Around the stack that is there: vLLM builds it before it hands the application out, and nothing can be added afterwards.
    stack = app.middleware_stack or app.build_middleware_stack()
    versioned = VersionedRequests(
        stack,
        served=lambda: getattr(app.state.engine_client, _LABEL, None),
        adapters=lambda: getattr(getattr(app.state.engine_client, _LORAS, None), "live", ()),
    )

    async def asked(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
        client = getattr(app.state, "engine_client", None)
        if uses_backend(getattr(client, "vllm_config", None)):
            keep_label(type(client))  # before the first label can come by a route
            await versioned(scope, receive, send)
        else:
            await stack(scope, receive, send)

    app.middleware_stack = asked
    return app
