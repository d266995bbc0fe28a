"""Rollouts for a trainer: admission by staleness, routing to replicas, resumption after updates, and a version for every token.

See ``docs/guides/rollouts.md``.
"""

from __future__ import annotations

import importlib
import warnings

from weightsync.rollouts.blocking import Rollouts
from weightsync.rollouts.controller import Counts, Generate, Rollout, RolloutController, RolloutSettings, Task
from weightsync.rollouts.generation import Completions, Generation, VllmTokens
from weightsync.rollouts.routing import Replicas
from weightsync.rollouts.samples import Chunk, Sample, Sampling
from weightsync.rollouts.staleness import Admission, capacity
from weightsync.server.watch import Watch

__all__ = [
    "Admission",
    "Chunk",
    "Completions",
    "Counts",
    "Generate",
    "Generation",
    "Replicas",
    "Rollout",
    "RolloutController",
    "RolloutSettings",
    "Rollouts",
    "Sample",
    "Sampling",
    "Task",
    "VllmTokens",
    "Watch",
    "capacity",
]

_MOVED = frozenset({"CommandFollower", "CompletionReceiver", "CompletionSender", "RolloutCallback", "Server", "UpdateServers"})


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{name} is in the package weightsync-callbacks now (pip install ./callbacks in a clone of weightsync): import it from "
        "weightsync_callbacks",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module("weightsync_callbacks"), name)
