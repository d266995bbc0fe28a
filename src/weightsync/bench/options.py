"""What ``weightsync bench`` was asked for."""

from __future__ import annotations

import msgspec

from weightsync.errors import ConfigurationError

__all__ = ["BenchOptions"]


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises :class:`~weightsync.errors.ConfigurationError` for sizes that cannot be measured."""

    suite: str = "cpu"
    """``cpu`` (all of the following), ``plan`` (digest and planning) or ``transfer`` (whole rounds)."""
    size: int = 1 << 30
    """Bytes of the model."""
    tensors: int = 0
    """Only cases with so many tensors; 0 for all."""
    only: tuple[str, ...] = ()
    """Only cases whose names contain one of these."""
    rounds: int = 5
    """Rounds that are measured, after the one that sets up."""
    json: bool = False

    def __post_init__(self) -> None:
        """Check each value."""
        if self.size < 1 << 20:
            raise ConfigurationError(f"a benchmark needs at least 1 MiB, not {self.size} bytes")
        if self.rounds < 1:
            raise ConfigurationError("a benchmark needs at least one round")
