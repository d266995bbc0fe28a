"""Checks of ``python -m weightsync.integrations verl``: what verl finds in this environment, and the errors that it hides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, entry_points, version

from msgspec.structs import replace

from weightsync.config import ClientSettings, variable
from weightsync.errors import WeightSyncError
from weightsync.integrations.checks import find_called_vllm
from weightsync.integrations.stream_options import server_settings
from weightsync.releases import releases_tested
from weightsync.server.findings import Finding, ask_coordinator, find_token_of_workers
from weightsync.server.server import BackgroundServer

_GROUP, _PLUGIN = "verl.plugins", "weightsync.integrations.verl.plugin"
_LINE = "actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync"
_MODULE = f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={_PLUGIN}"


def findings() -> Iterator[Finding]:
    """Yield one finding after the other, where verl is installed."""
    yield from (check() for check in (_ray, _entry_point, _registered, _workers, _token, _coordinator))


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
    if _left_out():
        return Finding("entry point", "limited", f"{_left_out()} leaves weightsync out", f"add it there, or set {_MODULE}")
    return Finding("entry point", "ok", f"{_GROUP}: weightsync = {_PLUGIN}")


def _left_out() -> str:
    """The setting that stops verl from loading weightsync's plugin; empty if there is none."""
    policy = variable("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = policy == "auto" or "weightsync" in {name.strip() for name in policy.split(",")}
    return "" if allowed else f"VERL_USE_EXTERNAL_PLUGINS={policy}"


def _registered() -> Finding:
    try:
        import verl.checkpoint_engine.base as engines

        by_itself = "weightsync" in engines.CheckpointEngineRegistry._registry
        from verl.workers.config import CheckpointEngineConfig

        by_name = "custom_backend_module" in {field.name for field in fields(CheckpointEngineConfig)}
        from weightsync.integrations.verl.backend import StreamCheckpointEngine

        StreamCheckpointEngine(bucket_size=1 << 20)
    except Exception as error:  # noqa: BLE001 - verl would hide it
        return Finding("backend", "missing", f"{type(error).__name__}: {error}", "verl says that the backend is not registered")
    if by_itself:
        return Finding("backend", "ok", f"verl has registered it. Use it by {_LINE}")
    if not by_name:
        return Finding(
            "backend", "missing", "this verl loads no plugins and has no custom_backend_module, so it cannot find weightsync",
            f"install {releases_tested('verl')}",
        )  # fmt: skip
    why = f"{_left_out()} stops verl from loading it" if _left_out() else "this verl does not load plugins (0.9 does)"
    return Finding("backend", "limited", why, f"set {_LINE} and {_MODULE}")


def _workers() -> Finding:
    """Whether vLLM's workers can read the actor's shards."""
    whole = "whole tensors travel, through verl's own adapter"
    from verl.workers.rollout import base

    if not str(getattr(base, "_ROLLOUT_REGISTRY", {}).get(("vllm", "async"))).startswith(_PLUGIN):
        return Finding("vLLM", "limited", "this verl makes its own adapter for vLLM (0.9 makes weightsync's)", whole)
    return find_called_vllm("actor", whole)


def _token() -> Finding:
    return find_token_of_workers("actor rank 0", "on each before `ray start`")


def _coordinator() -> Finding:
    """Ask the coordinator that is named, or start one for a moment as actor rank 0 would."""
    try:
        if variable("WEIGHTSYNC_COORDINATOR"):
            finding = ask_coordinator("coordinator", ClientSettings.load())
            if finding.status == "ok":
                return finding
            advice = "verl needs none: unset WEIGHTSYNC_COORDINATOR, and actor rank 0 starts one"
            return replace(finding, cost=f"{finding.cost}. {advice}")
        import ray

        with BackgroundServer(server_settings(ray.util.get_node_ip_address().strip("[]"))) as server:
            finding = ask_coordinator("coordinator", ClientSettings.load(coordinator=server.url))
            return replace(finding, value=f"{finding.value} (started for this check, as actor rank 0 starts one; stopped again)")
    except WeightSyncError as error:
        return Finding("coordinator", "missing", f"{type(error).__name__}: {error}", "actor rank 0 could not start one either")
