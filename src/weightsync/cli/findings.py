"""What ``weightsync doctor`` finds."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Status"]

Status = Literal["ok", "limited", "missing", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at: what was found, and what it costs if it is not ``ok``."""

    name: str
    status: Status
    found: str
    cost: str = ""
