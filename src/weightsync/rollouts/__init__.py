"""Rollouts for a trainer: admission by staleness, routing to replicas, resumption after updates, and a version for every token.

See ``docs/guides/rollouts.md``.
"""

from __future__ import annotations

from weightsync.rollouts.blocking import Rollouts
from weightsync.rollouts.callbacks import RolloutCallback
from weightsync.rollouts.controller import Counts, Generate, Rollout, RolloutController, RolloutSettings, Task
from weightsync.rollouts.generation import Completions, Generation, VllmTokens
from weightsync.rollouts.mail import CompletionReceiver, CompletionSender
from weightsync.rollouts.orders import CommandFollower, Server, UpdateServers
from weightsync.rollouts.replicas import Replicas
from weightsync.rollouts.samples import Chunk, Sample, Sampling
from weightsync.rollouts.staleness import Admission, capacity
from weightsync.server.watch import Watch

__all__ = [
    "Admission",
    "Chunk",
    "CommandFollower",
    "CompletionReceiver",
    "CompletionSender",
    "Completions",
    "Counts",
    "Generate",
    "Generation",
    "Replicas",
    "Rollout",
    "RolloutCallback",
    "RolloutController",
    "RolloutSettings",
    "Rollouts",
    "Sample",
    "Sampling",
    "Server",
    "Task",
    "UpdateServers",
    "VllmTokens",
    "Watch",
    "capacity",
]
