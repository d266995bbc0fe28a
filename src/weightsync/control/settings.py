"""What the owner of a coordinator may choose. Frozen, validated, passed in."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from weightsync.errors import ConfigurationError
from weightsync.messages import PauseMode

__all__ = ["Require", "Settings"]

Require = Literal["all", "any"] | int
"""Which replicas a round needs to be ``ok``: all that are known, at least one, or at least so many (0: none).

A replica is known from its first connection on, also while it is lost, refused (its tensors differ) or not complete. It is
forgotten when all of its ranks were closed on purpose (``Engine.close()``, also by the end of a ``with`` block).
"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How rounds are run. Raises :class:`~weightsync.errors.ConfigurationError` for values that make no sense."""

    run: str
    """The run's id, part of every version."""
    pause_mode: PauseMode = "abort"
    require: Require = "any"
    max_unavailable: int | None = None
    """Replicas that may be out of service at a time (a rolling round); ``None``: all at once. Who serves nothing is not counted."""
    timeout: float = 300.0
    """Seconds for a round that nobody gave a timeout, and the most that any round gets."""
    grace: float = 5.0
    """Seconds that a quarantine may take after a failure, even after the round's deadline or while the round is cancelled."""
    retry: bool = True
    """Whether replicas that a publication left dirty get one more attempt at once, in the background, from the shelves."""
    history: int = 32
    """Ended rounds that status shows."""
    plan_bytes: int | None = None
    """Memory that plans may take, together; ``None``: half of this machine's."""

    def __post_init__(self) -> None:
        """Check each value."""
        if not self.run:
            raise ConfigurationError("a coordinator needs the id of its run")
        if self.pause_mode not in get_args(PauseMode):
            raise ConfigurationError(f"pause mode {self.pause_mode!r} is none of {', '.join(get_args(PauseMode))}")
        if self.require not in ("all", "any") and not (type(self.require) is int and self.require >= 0):
            raise ConfigurationError(f"require is 'all', 'any' or a number of replicas, not {self.require!r}")
        for name in ("timeout", "grace"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a positive number of seconds, not {value!r}")
        if self.max_unavailable is not None and self.max_unavailable < 1:
            raise ConfigurationError(f"max_unavailable is at least one replica, or None for all, not {self.max_unavailable!r}")
        if self.plan_bytes is not None and self.plan_bytes < 1:
            raise ConfigurationError(f"plan_bytes is a positive number of bytes, not {self.plan_bytes}")
        if self.history < 1:
            raise ConfigurationError(f"history must be at least one round, not {self.history}")
