"""What the trainer's first rank tells the process that started it, a line of JSON each."""

from __future__ import annotations

import msgspec

from examples.demo.reports import Listening, Ready

__all__ = ["Progress", "Report", "WarmedUp"]


class WarmedUp(msgspec.Struct, frozen=True, tag=True):
    """The supervised beginning is over."""

    loss: float
    seconds: float


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One batch was learned from, and the version that came of it published (async: is being published)."""

    step: int
    reward: float
    """Mean over the batch's samples, which older weights made."""
    loss: float
    clipped: float
    """Share of ratios that were cut off."""
    version: int
    staleness: dict[int, int]
    """Samples, by how many versions their oldest token was behind the trainer."""
    mixed: int
    """Samples made by two versions or more."""
    interruptions: int
    """Requests that were cut off by a pause and gone on with, so far."""
    dropped: int
    """Groups that were finished too late and thrown away, so far."""
    tokens: int
    waited: float
    """Seconds that the trainer waited in this step: for the batch, and for replicas to take a version."""
    seconds: float
    example: str
    """One prompt with its answer."""


Report = Listening | Ready | WarmedUp | Progress
