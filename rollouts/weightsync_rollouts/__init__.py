"""Rollouts for a trainer: admission by staleness, routing to replicas, resumption after updates, and a version for every token.

See ``docs/guides/rollouts.md``.
"""

from __future__ import annotations

from weightsync.server.watch import Watch
from weightsync_rollouts.blocking import Rollouts
from weightsync_rollouts.controller import Counts, Generate, Rollout, RolloutController, RolloutSettings, Task
from weightsync_rollouts.generation import Completions, Generation, VllmTokens
from weightsync_rollouts.routing import Replicas
from weightsync_rollouts.samples import Chunk, Sample, Sampling
from weightsync_rollouts.staleness import Admission, capacity

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
