"""vLLM (0.32, in development mode), driven from outside: the requests of its routes for updates as values.

These routes are open to every client that reaches the server, also where it has an API key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.external.clients.http import HttpCall
from weightsync.model import PauseMode
from weightsync.old_names import moved_names

MISSING_ROUTE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
RESUME = HttpCall("POST", "/resume")
"""Generate again."""


def init_engine(info: Mapping[str, Any]) -> HttpCall:
    """Make the backend ready, once."""
    return HttpCall("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})


def pause(mode: PauseMode, *, clear_cache: bool = True) -> HttpCall:
    """Stop generating. With ``keep`` requests are held; if caches are dropped, their entries are computed again."""
    return HttpCall("POST", f"/pause?mode={mode}&clear_cache={'true' if clear_cache else 'false'}")


def reset_prefix_cache(*, everything: bool = False) -> HttpCall:
    """Drop the prefix cache; ``everything``: also entries of requests that are held, and in an external cache.

    Answers 200 even where it did not: look at ``success``.
    """
    more = "?reset_running_requests=true&reset_external=true" if everything else ""
    return HttpCall("POST", f"/reset_prefix_cache{more}")


def update_weight_version(version: str) -> HttpCall:
    """Label the weights that are there: in ``/weight_info``, and in the version spans of outputs."""
    return HttpCall("POST", "/update_weight_version", {"new_version": version})


def collective_rpc(method: str) -> HttpCall:
    """Call a method of every worker."""
    return HttpCall("POST", "/collective_rpc", {"method": method})


moved_names(
    __name__, "weightsync_disaggregated.clients.vllm",
    *("SHUTDOWN_ENGINE", "START_WEIGHT_UPDATE", "VLLMClient", "finish_weight_update", "update_weights"),
)  # fmt: skip
