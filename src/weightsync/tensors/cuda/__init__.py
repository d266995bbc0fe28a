"""Kernels for tensors in GPU memory: one launch copies every tile of a rank, one launch digests every row of its layout."""

from __future__ import annotations

__all__: list[str] = []
