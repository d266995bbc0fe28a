"""Checks of ``python -m weightsync.integrations`` for frameworks whose trainer joins a coordinator that runs already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import weightsync
from weightsync.config import ClientSettings
from weightsync.errors import WeightSyncError
from weightsync.integrations.releases import SERIES
from weightsync.server.findings import Finding, ask_coordinator, find_release

__all__ = ["FRAMEWORKS", "Framework", "findings"]


class Framework(NamedTuple):
    """What is looked at."""

    looked_at: str
    """What of the framework is replaced or substituted."""
    fits: str
    """What is said if it fits."""
    look: Callable[[], None]
    """Imports what the trainer would, in the same way, and raises why it would fail."""


def _areal() -> None:
    from weightsync.integrations.areal.actor import check_engine

    check_engine()


def _openrlhf() -> None:
    from weightsync.integrations.openrlhf.policy import check_trainer

    check_trainer()


def _skyrl() -> None:
    from weightsync.integrations.skyrl import enable

    enable()


def _trl() -> None:
    from trl.generation import vllm_generation

    from weightsync.integrations.trl.server_mode import NEEDED, check_interface

    check_interface(vllm_generation, NEEDED)


FRAMEWORKS = {
    "areal": Framework("engine", "FSDPEngine has what weightsync replaces and calls", _areal),
    "openrlhf": Framework("policy", "its policy actors have what weightsync replaces", _openrlhf),
    "skyrl": Framework("trainer", "enable() takes its name in vLLM's factory of trainer engines", _skyrl),
    "trl": Framework("server mode", "enable() finds what it substitutes", _trl),
}
"""By the name of the package."""


def findings(name: str) -> Iterator[Finding]:
    """Yield one finding after the other; that of the interface only where the framework is installed."""
    framework, series = FRAMEWORKS[name], SERIES[name]
    yield Finding("weightsync", "ok", weightsync.__version__)
    yield ask_coordinator("coordinator", ClientSettings.load())
    release = find_release(name, series.title, series.tried, series.has)
    yield release
    if release.status == "missing":
        return
    try:
        framework.look()
    except (ImportError, WeightSyncError) as error:
        yield Finding(framework.looked_at, "missing", f"{type(error).__name__}: {error}", "enable() raises this too")
    else:
        yield Finding(framework.looked_at, "ok", framework.fits)
