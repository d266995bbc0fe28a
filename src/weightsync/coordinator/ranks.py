"""Interface of a rank that the coordinator controls. The server implements it over a WebSocket, tests implement it in-process.

Each method returns or raises within ``timeout`` seconds. The caller enforces its own deadline as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsync.model import Layout, Manifest, PauseMode, Version
from weightsync.protocol.messages import (
    Delivery,
    EndStream,
    Host,
    Moved,
    MoveWindow,
    Offer,
    OpenStream,
    PlaceWindow,
    PlanSlice,
    Prepared,
    Updated,
    WindowPlaced,
)

__all__ = ["EngineNode", "EngineRank", "PublishingRank", "TrainerNode", "TrainerRank"]


@dataclass(frozen=True)
class PublishingRank:
    """A rank from which engine ranks can read: of the trainer, or of a replica that serves its weights to others."""

    member: str
    rank: int
    world_size: int
    session: str
    host: Host
    manifest: Manifest
    layout: Layout
    offers: tuple[Offer, ...]
    key: bytes = field(default=b"", repr=False)
    """Secret that readers of this rank's region must know. Each plan's ``SourceAddress`` carries it."""
    live: bool = False
    """Whether readers read the rank's own memory in place. Of a trainer rank that is possible only during a publication."""


@dataclass(frozen=True)
class TrainerRank(PublishingRank):
    """Self-description of a trainer rank, sent when it joined."""

    published: int = -1
    epoch: int = 0
    """Epoch in which the rank publishes; 0 before it received one."""
    new_epoch: bool = False
    version: Version | None = None
    """Last version that the rank published."""
    window_bytes: int = 0
    """Bytes of a staging window of a rank that publishes streams; else 0."""
    windows: int = 0
    """Number of its staging windows."""
    pid: int = 0
    credential: str = field(default="", repr=False)


@dataclass(frozen=True)
class EngineRank:
    """Self-description of an engine rank, sent when it joined."""

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
    takes_any: bool = False
    """Whether the rank takes whatever tensors a stream brings."""
    source: PublishingRank | None = None
    """What other replicas can read from it; ``None`` if it does not serve its weights."""
    pid: int = 0
    credential: str = field(default="", repr=False)


class TrainerNode(Protocol):
    """A trainer rank under the coordinator's control."""

    @property
    def rank(self) -> TrainerRank:
        """Self-description of the rank."""
        ...

    def dismiss(self, reason: str) -> None:
        """Close this connection and tell its process why. Returns at once."""
        ...

    async def place(self, number: int, timeout: float, epoch: int) -> npt.NDArray[np.uint64]:
        """Make version ``number`` of ``epoch`` readable. Returns the digest of each row of the rank's layout, ``uint64[rows]``."""
        ...

    async def place_window(self, body: PlaceWindow, timeout: float) -> WindowPlaced:
        """Make a window of a stream readable. Returns what is in it, or the end of the stream."""
        ...

    def notify(self, text: str) -> None:
        """Show ``text`` in the rank's log. Returns at once, before delivery."""
        ...


class EngineNode(Protocol):
    """An engine rank under the coordinator's control."""

    @property
    def rank(self) -> EngineRank:
        """Self-description of the rank."""
        ...

    def dismiss(self, reason: str) -> None:
        """Close this connection and tell its process why. Returns at once."""
        ...

    async def prepare(self, plan: PlanSlice, timeout: float) -> Prepared:
        """Prepare for a plan while still serving."""
        ...

    async def check_sources(self, number: int, timeout: float) -> None:
        """Check that version ``number`` can be read, while still serving.

        Raises:
            StaleSource: It cannot.
        """
        ...

    async def place(self, number: int, timeout: float, epoch: int) -> npt.NDArray[np.uint64]:
        """Make the version that it serves readable for other replicas. Returns the digest of each row of its source's layout.

        Raises:
            StaleSource: It does not serve version ``number`` of ``epoch``.
        """
        ...

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generation."""
        ...

    async def move(self, number: int, timeout: float) -> Moved:
        """Move version ``number`` into place. The answer holds the digests of what was installed."""
        ...

    async def open_stream(self, body: OpenStream, timeout: float) -> Prepared:
        """Prepare for the windows of streams while still serving."""
        ...

    async def move_window(self, body: MoveWindow, timeout: float) -> npt.NDArray[np.uint64]:
        """Move a window into place. Returns the digest of each of its parts, ``uint64[parts]``."""
        ...

    async def end_stream(self, body: EndStream, timeout: float) -> Moved:
        """Load what is left, after the last window. The answer holds the digest of each tensor of the stream."""
        ...

    async def commit(self, version: Version, timeout: float) -> None:
        """Finish loading, flush caches and set the version label."""
        ...

    async def resume(self, timeout: float) -> None:
        """Resume generation."""
        ...

    async def update(self, version: Version, mode: PauseMode, timeout: float) -> Updated:
        """Pause, move, commit and resume in one exchange, for a rank that is a whole replica. It compares digests before commit."""
        ...

    async def quarantine(self, reason: str, timeout: float) -> None:
        """Abort the running update and stay paused."""
        ...

    def notify(self, text: str) -> None:
        """Show ``text`` in the rank's log. Returns at once, before delivery."""
        ...
