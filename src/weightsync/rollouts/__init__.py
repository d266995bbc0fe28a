"""Old name of the package ``weightsync_rollouts``, and of the names of ``weightsync_callbacks``."""

from __future__ import annotations

from weightsync.old_names import moved, moved_names

_MODULES = ("blocking", "controller", "generation", "routing", "samples", "staleness")
_CALLBACKS = ("CommandFollower", "CompletionReceiver", "CompletionSender", "RolloutCallback", "Server", "UpdateServers")

moved(__name__, "weightsync_rollouts", *_MODULES, note=", and its callbacks are in weightsync-callbacks")
moved_names(__name__, "weightsync_callbacks", *_CALLBACKS)
