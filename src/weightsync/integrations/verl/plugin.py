"""What verl imports in each of its processes: registers the checkpoint engine ``weightsync``.

verl 0.9 finds this module by the entry point ``weightsync`` in the group ``verl.plugins``, and logs at level DEBUG if its import
fails. verl 0.8 needs its name: ``checkpoint_engine.custom_backend_module=weightsync.integrations.verl.plugin``.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

try:
    from weightsync.integrations.verl.backend import BACKEND, StreamCheckpointEngine
except Exception as error:
    _log.warning("weightsync is not available as a checkpoint engine of this verl: %s: %s", type(error).__name__, error)
    raise

__all__ = ["BACKEND", "StreamCheckpointEngine"]
