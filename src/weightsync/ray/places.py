"""Values that a manager sends to an actor: the coordinator's address, and the actor's rank. Needs no tensor library."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Access:
    """URL and token of the coordinator."""

    url: str
    token: str | None = field(repr=False)


@dataclass(frozen=True)
class RankPlace:
    """Rank of an actor, in the trainer (``replica`` is ``None``) or in a replica."""

    replica: str | None
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{'the trainer' if self.replica is None else f'replica {self.replica!r}'}, rank {self.rank}"
