"""Transport ``nixl`` of weightsync: memory that readers pull by one-sided reads, through NVIDIA's NIXL."""

from __future__ import annotations

from weightsync_nixl.transport import Nixl

__all__ = ["Nixl"]
