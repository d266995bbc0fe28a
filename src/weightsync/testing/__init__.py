"""Old name of the package ``weightsync_testing``."""

from __future__ import annotations

import importlib
import sys
import warnings

__all__: list[str] = []

_NOW = "weightsync.testing is the package weightsync-testing now (pip install ./testing in a clone of weightsync)"

try:
    importlib.import_module("weightsync_testing")
except ModuleNotFoundError as error:
    if error.name != "weightsync_testing":
        raise
    raise ModuleNotFoundError(_NOW, name=error.name) from None

warnings.warn(f"{_NOW}: import from weightsync_testing", DeprecationWarning, stacklevel=2)
for _name in ("adapter_contract", "copy_cases", "fork_server", "owner_process", "transport_contract"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"weightsync_testing.{_name}")
