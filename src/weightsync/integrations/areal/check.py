"""Checks of ``python -m weightsync.integrations areal``: what a training rank of AReaL finds in this environment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import weightsync
from weightsync.config import ClientSettings
from weightsync.server.findings import Finding, ask_coordinator

__all__ = ["TRIED", "findings"]

TRIED = "1.0"
"""Series of releases. Another is used if its interface fits."""


def findings() -> Iterator[Finding]:
    """Yield one finding after the other; that of the engine only where AReaL is installed."""
    yield Finding("weightsync", "ok", weightsync.__version__)
    yield ask_coordinator("coordinator", ClientSettings.load())
    try:
        release = version("areal")
    except PackageNotFoundError:
        yield Finding(
            "areal",
            "missing",
            "not installed in this environment",
            "install weightsync in AReaL's environment; run this there",
        )
        return
    if release.startswith(f"{TRIED}."):
        yield Finding("areal", "ok", release)
    else:
        yield Finding("areal", "limited", release, f"tried with {TRIED}; used if the interface fits")
    yield _engine()


def _engine() -> Finding:
    try:
        from weightsync.integrations.areal.actor import missing_methods
    except ImportError as error:
        return Finding("engine", "missing", f"{type(error).__name__}: {error}", "enable() raises this too")
    missing = missing_methods()
    if missing:
        return Finding("engine", "missing", f"this FSDPEngine has no {', '.join(missing)}", "updates would fail")
    return Finding("engine", "ok", "FSDPEngine has what weightsync replaces and calls")
