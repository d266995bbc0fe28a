"""What a manager tells an actor: where the coordinator is, and which rank it is. Crosses Ray; knows no tensor library."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Access", "Place"]


@dataclass(frozen=True)
class Access:
    """Where the coordinator is and what it wants to see."""

    url: str
    token: str | None = field(repr=False)


@dataclass(frozen=True)
class Place:
    """Which rank of what an actor is: of the trainer (``replica`` is ``None``) or of a replica."""

    replica: str | None
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{'the trainer' if self.replica is None else f'replica {self.replica!r}'}, rank {self.rank}"
