"""Contract suites for transports and engine adapters of third parties (extra ``testing``)."""

from __future__ import annotations

__all__: list[str] = []

try:
    import pytest as _pytest  # noqa: F401 - one check for the whole package
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        "weightsync.testing needs pytest: pip install '.[testing]' in a clone of weightsync", name="pytest"
    ) from None
