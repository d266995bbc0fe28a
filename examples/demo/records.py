"""What the client writes down of every answer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Response"]


@dataclass(frozen=True)
class Response:
    """One answer as the client recorded it: what went in, what came out, and what the server said of it."""

    replica: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    token_versions: tuple[int, ...]
    prefills: tuple[int, ...]
    probe_of: int | None = None
    """The version after whose round this was asked as a probe."""
