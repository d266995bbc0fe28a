"""Findings of ``weightsync doctor``."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Status"]

Status = Literal["ok", "limited", "missing", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """Result of one check: what was found, and its impact if the status is not ``ok``."""

    name: str
    status: Status
    value: str
    cost: str = ""
