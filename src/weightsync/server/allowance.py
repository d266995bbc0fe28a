"""What may be taken at a bounded rate, and some of it at once: connections, frames of a peer, time of the event loop."""

from __future__ import annotations

import time


class RateAllowance:
    """``burst`` may be taken at once, ``rate`` a second in the long run."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._paid_until = time.monotonic()

    def early(self, amount: float = 0.0) -> float:
        """Return in how many seconds ``amount`` may be taken."""
        ahead = max(self._paid_until - time.monotonic(), 0.0)
        return max(ahead + (amount - self._burst) / self._rate, 0.0)

    def take(self, amount: float = 1.0) -> float:
        """Take ``amount``, or give it back if it is negative. Returns by how many seconds this comes too early."""
        self._paid_until = max(self._paid_until, time.monotonic()) + amount / self._rate
        return self.early()
