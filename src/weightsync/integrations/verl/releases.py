"""Which releases of verl the checkpoint engine was tried with."""

from __future__ import annotations

__all__ = ["TRIED", "is_tried"]

TRIED = ("0.8", "0.9")
"""Series of releases. Others are used if their interface fits."""


def is_tried(release: str) -> bool:
    """Whether ``release`` is of a series in :data:`TRIED`."""
    return release.startswith(tuple(f"{series}." for series in TRIED))
