"""What the control layer asks of a rank. The service implements it over a WebSocket, tests in-process.

Each method ends within ``timeout`` seconds, with an error at the latest; the caller bounds it a second time all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync.model import Layout, Manifest, PauseMode, Version
from weightsync.protocol.messages import Delivery, Host, Moved, Offer, PlanSlice, Prepared, Updated

__all__ = ["EngineNode", "EngineRank", "TrainerNode", "TrainerRank"]


@dataclass(frozen=True)
class TrainerRank:
    """What a trainer rank said of itself when it joined."""

    member: str
    rank: int
    world_size: int
    session: str
    host: Host
    manifest: Manifest
    layout: Layout
    offers: tuple[Offer, ...]
    key: bytes = field(default=b"", repr=False)
    """The secret that readers of this rank's shelf must know; passed on in each plan's ``SourceAddress``."""
    published: int = -1
    live: bool = False
    """Its own memory is read in place, and only until a publication is over."""
    epoch: int = 0
    """The epoch in which it publishes, if it has been told one."""
    new_epoch: bool = False
    version: Version | None = None
    """The last one that it published."""
    pid: int = 0
    credential: str = field(default="", repr=False)


@dataclass(frozen=True)
class EngineRank:
    """What an engine rank said of itself when it joined."""

    member: str
    replica: str
    rank: int
    world_size: int
    session: str
    host: Host
    manifest: Manifest
    layout: Layout | None
    transports: tuple[str, ...]
    delivery: Delivery = "auto"
    bucket_bytes: int = 256 << 20
    adapter: str = "custom"
    serving: Version | None = None
    no_layout: str = ""
    device_memory: bool = False
    pid: int = 0
    credential: str = field(default="", repr=False)


class TrainerNode(Protocol):
    """A trainer rank under the coordinator's control."""

    @property
    def rank(self) -> TrainerRank:
        """What it is."""
        ...

    def dismiss(self, reason: str) -> None:
        """End this connection, and tell its process why. Returns at once."""
        ...

    async def place(self, number: int, timeout: float, epoch: int) -> npt.NDArray[np.uint64]:
        """Make version ``number`` of ``epoch`` readable and return the digest of each row of its layout."""
        ...

    def notify(self, text: str) -> None:
        """Show ``text`` in this rank's log. Returns at once; nobody waits for it to arrive."""
        ...


class EngineNode(Protocol):
    """An engine rank under the coordinator's control."""

    @property
    def rank(self) -> EngineRank:
        """What it is."""
        ...

    def dismiss(self, reason: str) -> None:
        """End this connection, and tell its process why. Returns at once."""
        ...

    async def prepare(self, plan: PlanSlice, timeout: float) -> Prepared:
        """Get ready for a plan while still serving."""
        ...

    async def check_sources(self, number: int, timeout: float) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` if version ``number`` cannot be read; the rank serves on."""
        ...

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating."""
        ...

    async def move(self, number: int, timeout: float) -> Moved:
        """Bring version ``number`` into place; the answer holds the digests of what was installed."""
        ...

    async def commit(self, version: Version, timeout: float) -> None:
        """Finish, flush, label."""
        ...

    async def resume(self, timeout: float) -> None:
        """Generate again."""
        ...

    async def update(self, version: Version, mode: PauseMode, timeout: float) -> Updated:
        """All of these in one exchange, of a rank that is a whole replica: it compares digests itself before it commits."""
        ...

    async def quarantine(self, reason: str, timeout: float) -> None:
        """Abort what is running and stay paused."""
        ...

    def notify(self, text: str) -> None:
        """Show ``text`` in this rank's log. Returns at once; nobody waits for it to arrive."""
        ...
