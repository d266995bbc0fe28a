"""Old name of the package ``weightsync_testing``."""

from __future__ import annotations

from weightsync.old_names import moved

_MODULES = ("adapter_contract", "copy_cases", "fork_server", "owner_process", "transport_contract")

moved(__name__, "weightsync_testing", *_MODULES)
