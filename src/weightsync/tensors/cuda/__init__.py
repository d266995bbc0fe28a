"""GPU kernels: one launch copies all tiles of a rank, one launch digests all rows of its layout."""

from __future__ import annotations

__all__: list[str] = []
