"""Old name of the module ``weightsync_disaggregated.rank``."""

from __future__ import annotations

from weightsync.old_names import moved

moved(__name__, "weightsync_disaggregated.rank")
