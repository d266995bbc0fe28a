"""Checks of ``python -m weightsync.integrations verl``: what verl finds in this environment, and the errors that it hides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

import weightsync
from weightsync.config import ClientSettings, token_source
from weightsync.errors import WeightSyncError
from weightsync.integrations.stream_options import server_settings
from weightsync.integrations.verl.releases import TRIED, is_tried
from weightsync.server.findings import Finding, ask_coordinator, find_release
from weightsync.server.server import BackgroundServer

__all__ = ["findings"]

_GROUP, _PLUGIN = "verl.plugins", "weightsync.integrations.verl.plugin"
_LINE = "actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync"
_MODULE = f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={_PLUGIN}"


def findings() -> Iterator[Finding]:
    """Yield one finding after the other; those that need verl only where it can be imported."""
    yield Finding("weightsync", "ok", weightsync.__version__)
    yield _ray()
    release = find_release("verl", "verl", " and ".join(TRIED), is_tried)
    yield release
    if release.status == "missing":
        return
    yield _entry_point()
    yield _registered()
    yield _token()
    yield _coordinator()


def _ray() -> Finding:
    try:
        return Finding("ray", "ok", version("ray"))
    except PackageNotFoundError:
        return Finding("ray", "missing", "not installed in this environment", "verl runs on Ray")


def _entry_point() -> Finding:
    names = {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    if names.get("weightsync") != _PLUGIN:
        return Finding(
            "entry point", "missing", f"group {_GROUP} of this environment has {', '.join(names) or 'nothing'}",
            "weightsync was installed before it had this entry point: install it again",
        )  # fmt: skip
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = policy == "auto" or "weightsync" in {name.strip() for name in policy.split(",")}
    if not allowed:
        return Finding(
            "entry point", "limited", f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves weightsync out", f"add it there, or set {_MODULE}"
        )
    return Finding("entry point", "ok", f"{_GROUP}: weightsync = {_PLUGIN}")


def _registered() -> Finding:
    try:
        import verl.checkpoint_engine.base as engines

        by_itself = "weightsync" in engines.CheckpointEngineRegistry._registry
        from weightsync.integrations.verl.backend import StreamCheckpointEngine

        StreamCheckpointEngine(bucket_size=1 << 20)
    except Exception as error:  # noqa: BLE001 - verl would hide it
        return Finding("backend", "missing", f"{type(error).__name__}: {error}", "verl says that the backend is not registered")
    if by_itself:
        return Finding("backend", "ok", f"verl has registered it. Use it by {_LINE}")
    return Finding("backend", "limited", "verl does not load plugins by itself (0.8)", f"set {_LINE} and {_MODULE}")


def _token() -> Finding:
    source = token_source()
    if source is not None:
        return Finding("token", "ok", f"from {source}; every node needs the same")
    return Finding(
        "token", "limited", "none in this environment: actor rank 0 leaves one in a file of this user",
        "enough on one node. For several nodes set WEIGHTSYNC_TOKEN_FILE on each before `ray start`",
    )  # fmt: skip


def _coordinator() -> Finding:
    """Ask the coordinator that is named, or start one for a moment as actor rank 0 would."""
    try:
        if os.environ.get("WEIGHTSYNC_COORDINATOR"):
            return ask_coordinator("coordinator", ClientSettings.load())
        import ray

        with BackgroundServer(server_settings(ray.util.get_node_ip_address().strip("[]"))) as server:
            return ask_coordinator("coordinator", ClientSettings.load(coordinator=server.url))
    except WeightSyncError as error:
        return Finding("coordinator", "missing", f"{type(error).__name__}: {error}", "actor rank 0 could not start one either")
