"""What packed broadcasts are set to: how large their buffers are, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import ConfigurationError

__all__ = ["LEAST_BUFFER", "MOST_BUFFER", "BufferSettings"]

LEAST_BUFFER, MOST_BUFFER = 2 << 20, 4 << 30
_MOST_BUFFERS = 16


@dataclass(frozen=True)
class BufferSettings:
    """``num_buffers`` buffers at each end, used in turn: one is packed or unpacked while another is on its way.

    Each has ``buffer_bytes`` bytes, from 2 MiB to 4 GiB; or all together take ``buffer_memory_ratio`` of the memory that is free
    at the sender when its first group is made (up to a half; the rule's result is kept within the same bounds). Give one of the two
    at most; without either, the transport's own default. Raises :class:`~weightsync.errors.ConfigurationError` for anything else.
    """

    buffer_bytes: int | None = None
    buffer_memory_ratio: float | None = None
    num_buffers: int = 2

    def __post_init__(self) -> None:
        """Check each value: settings come from people."""
        if _not_int(self.num_buffers) or not 1 <= self.num_buffers <= _MOST_BUFFERS:
            raise ConfigurationError(f"num_buffers is a number from 1 to {_MOST_BUFFERS}, not {self.num_buffers!r}")
        if self.buffer_bytes is not None:
            if self.buffer_memory_ratio is not None:
                raise ConfigurationError("give buffer_bytes or buffer_memory_ratio, not both")
            if _not_int(self.buffer_bytes) or not LEAST_BUFFER <= self.buffer_bytes <= MOST_BUFFER:
                raise ConfigurationError(
                    f"buffer_bytes is a number of bytes from {LEAST_BUFFER:,} to {MOST_BUFFER:,}, not {self.buffer_bytes!r}"
                )
        ratio = self.buffer_memory_ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 0.5):
            raise ConfigurationError(f"buffer_memory_ratio is a part of the free memory, above 0 and at most 0.5, not {ratio!r}")

    def bytes_each(self, free: int, default: int) -> int:
        """The size of one buffer, where ``free`` bytes of memory are free. Whole 512-byte units."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes & -512
        if self.buffer_memory_ratio is None:
            return default
        return min(max(int(free * self.buffer_memory_ratio) // self.num_buffers, LEAST_BUFFER), MOST_BUFFER) & -512


def _not_int(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)
