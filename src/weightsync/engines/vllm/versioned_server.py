"""vLLM's HTTP server with :class:`~weightsync.external.versioned_requests.VersionedRequests` around it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from weightsync.engines.staged_adapter import UNLABELLED
from weightsync.external.versioned_requests import VersionedRequests

_LABEL = "_weightsync_label"
_BUILDERS = (
    "vllm.entrypoints.launchers.app", "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server",
    "__main__",
)  # fmt: skip
"""Modules that hold vLLM's ``build_app`` under this name: those that are imported, in any release."""


def keep_label(kind: Any) -> None:  # noqa: ANN401 - vLLM's class AsyncLLM
    """Make engines of class ``kind`` keep the label of their weights where their server finds it, and none while it changes."""
    update = getattr(kind, "update_weight_version", None)
    if update is None:  # vLLM 0.25 has no labels for weights
        return

    @functools.wraps(update)
    async def update_weight_version(self: Any, new_version: str) -> None:  # noqa: ANN401 - vLLM's
        setattr(self, _LABEL, None)
        await update(self, new_version)
        setattr(self, _LABEL, None if new_version == UNLABELLED else new_version)

    kind.update_weight_version = update_weight_version


def add_to_servers() -> None:
    """Put the middleware around every HTTP server that this process builds from now on. Idempotent."""
    for name in _BUILDERS:
        module: Any = sys.modules.get(name)
        build, spec = getattr(module, "build_app", None), getattr(module, "__spec__", None)
        if build is not None and spec is not None and spec.name.startswith("vllm.") and not hasattr(build, _LABEL):
            module.build_app = _with_versions(build)


@functools.cache
def _with_versions(build: Any) -> Any:  # noqa: ANN401 - vLLM's function
    @functools.wraps(build)
    def build_app(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        app = build(*args, **kwargs)
        # Around the stack that is there: vLLM builds it before it hands the application out, and nothing can be added afterwards.
        stack = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = VersionedRequests(
            stack, served=lambda: getattr(getattr(app.state, "engine_client", None), _LABEL, None)
        )
        return app

    setattr(build_app, _LABEL, True)
    return build_app
