"""Old name of the module ``weightsync_relay.relay``."""

from __future__ import annotations

from weightsync.old_names import moved

moved(__name__, "weightsync_relay.relay")
