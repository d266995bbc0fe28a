"""Old name of the package ``weightsync_rollouts``, and of the names of ``weightsync_callbacks``."""

from __future__ import annotations

import importlib
import sys
import warnings

__all__: list[str] = []

_NOW = (
    "weightsync.rollouts is the package weightsync-rollouts now, and its callbacks are weightsync-callbacks "
    "(pip install ./rollouts ./callbacks in a clone of weightsync)"
)
_CALLBACKS = frozenset({"CommandFollower", "CompletionReceiver", "CompletionSender", "RolloutCallback", "Server", "UpdateServers"})

try:
    _package = importlib.import_module("weightsync_rollouts")
except ModuleNotFoundError as error:
    if error.name != "weightsync_rollouts":
        raise
    raise ModuleNotFoundError(_NOW, name=error.name) from None

warnings.warn(f"{_NOW}: import from weightsync_rollouts", DeprecationWarning, stacklevel=2)
globals().update({_name: getattr(_package, _name) for _name in _package.__all__})
for _name in ("blocking", "controller", "generation", "routing", "samples", "staleness"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"weightsync_rollouts.{_name}")


def __getattr__(name: str) -> object:
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{name} is in the package weightsync-callbacks now (pip install ./callbacks in a clone of weightsync): import it from "
        "weightsync_callbacks",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module("weightsync_callbacks"), name)
