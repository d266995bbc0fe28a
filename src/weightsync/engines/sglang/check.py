"""Checks of ``python -m weightsync.integrations sglang``: what SGLang's processes find in this environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points

import weightsync
from weightsync.config import ClientSettings
from weightsync.engines.sglang.interface import TRIED, missing_parts
from weightsync.server.findings import Finding, ask_coordinator, find_release

__all__ = ["findings"]

_GROUP = "sglang.srt.plugins"


def findings() -> Iterator[Finding]:
    """Yield one finding after the other; those of the plugin and its parts only where SGLang is installed."""
    yield Finding("weightsync", "ok", weightsync.__version__)
    yield ask_coordinator("coordinator", ClientSettings.load())
    if os.environ.get("WEIGHTSYNC_COORDINATOR"):
        yield Finding("environment", "ok", "WEIGHTSYNC_COORDINATOR is set")
    else:
        yield Finding("environment", "missing", "WEIGHTSYNC_COORDINATOR is not set", "SGLang does not join")
    release = find_release("sglang", "SGLang", TRIED, lambda installed: installed == TRIED)
    yield release
    if release.status == "missing":
        return
    yield _plugin()
    yield _parts()


def _plugin() -> Finding:
    if "weightsync" not in {entry.name for entry in entry_points(group=_GROUP)}:
        return Finding("plugin", "missing", f"no entry point weightsync in the group {_GROUP}", "install weightsync again")
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "weightsync" not in {name.strip() for name in allowed.split(",")}:
        return Finding("plugin", "missing", f"SGLANG_PLUGINS is {allowed}", "SGLang does not load it: add weightsync")
    return Finding("plugin", "ok", f"in the group {_GROUP}")


def _parts() -> Finding:
    try:
        missing = missing_parts()
    except ImportError as error:
        return Finding("interface", "missing", f"{type(error).__name__}: {error}", "SGLang's scheduler cannot be imported here")
    if missing:
        return Finding("interface", "missing", f"SGLang has no {', '.join(missing)}", "SGLang serves without updates")
    return Finding("interface", "ok", "SGLang has what weightsync hooks and calls")
