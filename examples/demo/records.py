"""What the client writes down of every answer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Order", "Response"]

Order = tuple[int, int]
"""Epoch and number of a version. A number alone is ambiguous after a trainer resumed at an earlier checkpoint."""


@dataclass(frozen=True)
class Response:
    """One answer as the client recorded it: what went in, what came out, and what the server said of it."""

    replica: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    token_versions: tuple[int, ...]
    prefills: tuple[int, ...]
    probe_of: Order | None = None
    """The version after whose round this was asked as a probe."""
    token_epochs: tuple[int, ...] = ()
    """The epoch of each token's version. Empty: all are of the first epoch."""
    asked: str = ""
    """The adapter that was asked for, by name or by name and number; empty for the base weights."""
    adapter: str = ""
    """Name and number of the adapter that answered."""
    at_least: int = -1
    """Its newest version that every replica served when it was asked for."""

    def answered_by_what_was_asked(self) -> bool:
        """Whether that adapter has the right name, and the right number or one that is new enough."""
        name, _, number = self.asked.partition("@")
        made_by, _, made = self.adapter.partition("@")
        return made_by == name and (not name or (made == number if number else int(made) >= self.at_least))
