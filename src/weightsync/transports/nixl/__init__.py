"""Old name of the package ``weightsync_nixl``."""

from __future__ import annotations

from weightsync.old_names import moved

moved(__name__, "weightsync_nixl", "agent", "reader", "staged_frames", "transport")
