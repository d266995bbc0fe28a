"""Checks of ``python -m weightsync.integrations trl``: what TRL and vLLM find in this environment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import weightsync
from weightsync.config import ClientSettings
from weightsync.errors import WeightSyncError
from weightsync.integrations.trl.releases import TRIED, check_interface
from weightsync.integrations.trl.server_mode import NEEDED
from weightsync.server.findings import Finding, ask_coordinator

__all__ = ["findings"]


def findings() -> Iterator[Finding]:
    """Yield one finding after the other; that of the interface only where TRL can be imported."""
    yield Finding("weightsync", "ok", weightsync.__version__)
    yield ask_coordinator("coordinator", ClientSettings.load())
    try:
        release = version("trl")
    except PackageNotFoundError:
        yield Finding(
            "trl",
            "missing",
            "not installed in this environment",
            "install weightsync in TRL's environment; run this there",
        )
        return
    if release.startswith(f"{TRIED}."):
        yield Finding("trl", "ok", release)
    else:
        yield Finding("trl", "limited", release, f"tried with {TRIED}; used if the interface fits")
    yield _server_mode()


def _server_mode() -> Finding:
    try:
        from trl.generation import vllm_generation

        check_interface(vllm_generation, NEEDED)
    except (ImportError, WeightSyncError) as error:
        return Finding("server mode", "missing", f"{type(error).__name__}: {error}", "enable() raises this too")
    return Finding("server mode", "ok", "enable() finds what it substitutes")
