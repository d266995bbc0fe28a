"""Updates and completions by callback: a trainer that redirects its update to rollout controllers, and rollouts pushed to it.

The messages go through routes that this package mounts on a coordinator: ``weightsync serve --mount rollouts``. See
``docs/guides/rollouts.md``.
"""

from __future__ import annotations

from weightsync_callbacks.callbacks import RolloutCallback
from weightsync_callbacks.mail import CompletionReceiver, CompletionSender
from weightsync_callbacks.orders import CommandFollower, Server, UpdateServers

__all__ = ["CommandFollower", "CompletionReceiver", "CompletionSender", "RolloutCallback", "Server", "UpdateServers"]
