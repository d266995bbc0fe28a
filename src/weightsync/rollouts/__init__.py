"""Old name of the package ``weightsync_rollouts``, and of the names of ``weightsync_callbacks``."""

from __future__ import annotations

import warnings
from importlib import import_module

from weightsync.old_names import moved

_CALLBACKS = frozenset({"CommandFollower", "CompletionReceiver", "CompletionSender", "RolloutCallback", "Server", "UpdateServers"})
_MODULES = ("blocking", "controller", "generation", "routing", "samples", "staleness")

moved(
    __name__, "weightsync_rollouts", "./rollouts ./callbacks", *_MODULES, note=", and its callbacks are weightsync-callbacks"
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{name} is in the package weightsync-callbacks now (pip install ./callbacks in a clone of weightsync): import it from "
        "weightsync_callbacks",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module("weightsync_callbacks"), name)
