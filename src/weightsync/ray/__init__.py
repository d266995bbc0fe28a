"""Old name of the package ``weightsync_ray``."""

from __future__ import annotations

from weightsync.old_names import moved

moved(__name__, "weightsync_ray", "actor_calls", "coordinator_actor", "manager", "rejoining")
