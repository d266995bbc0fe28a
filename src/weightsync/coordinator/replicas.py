"""One serving engine, made of one or more ranks: the unit of pause, commit, health and version."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Any, Literal

from weightsync.coordinator.rank_handle import Link
from weightsync.coordinator.ranks import EngineNode
from weightsync.errors import MembershipError, PeerLost
from weightsync.model import Manifest, Version

__all__ = ["TRANSITIONS", "Replica", "State"]

_SHOWN = 16

State = Literal["registered", "loaded", "updating", "dirty", "lost"]

TRANSITIONS: dict[State, frozenset[State]] = {
    "registered": frozenset({"updating", "loaded", "dirty", "lost"}),  # loaded, dirty: what its ranks report on joining
    # dirty: other bytes were published under its version; registered: nobody knows which were
    "loaded": frozenset({"updating", "dirty", "lost", "registered"}),
    "updating": frozenset({"loaded", "dirty", "lost"}),
    "dirty": frozenset({"updating", "lost"}),  # never straight back to loaded
    "lost": frozenset({"registered"}),
}
"""Which state may follow which; everything else is a bug and raises."""


class Replica:
    """What the coordinator knows of one replica.

    ======== ===================================================================================================
    state    meaning
    ======== ===================================================================================================
    registered  not all of its ranks are here yet, or it has no version yet, or none that can be believed
    loaded      it serves ``version``: every rank verified and committed it. The only state to send requests to
    updating    a round has paused it
    dirty       a round failed in it: paused, without a version, until a later round succeeds
    lost        a rank's connection is gone
    ======== ===================================================================================================
    """

    def __init__(self, name: str, world_size: int, manifest: Manifest) -> None:
        self.name = name
        self.world_size = world_size
        self.manifest = manifest
        self.links: dict[int, Link[EngineNode]] = {}
        self.state: State = "registered"
        self.version: Version | None = None
        self.since = time.time()
        """When it entered this state, seconds since the epoch; for people."""
        self.error: str | None = None
        """Why the last attempt on it failed; ``None`` after a success."""
        self.refusal: str | None = None
        """Why no round takes it in (the trainer's tensors differ); ``None`` if one may."""
        self._vanished: set[int] = set()
        """Ranks whose connection ended without a goodbye, and that have not come back."""
        self.phases: dict[str, float] = {}
        """Seconds by phase of the last round that it took part in."""
        self.received: dict[str, int] = {}
        """Bytes of the running move in place, by member."""
        self.expected = 0
        """Bytes of a whole move, over its ranks."""
        self.was_complete = False
        """Whether all of its ranks were connected at some time."""
        self.preparing: asyncio.Task[Any] | None = None
        """Preparing for the next round while nothing runs, which that round lets end first."""
        self.quarantining: asyncio.Task[Any] | None = None
        """A quarantine outside of any round, which the next round lets end first."""

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state} {self.version or 'without version'} {len(self.links)}/{self.world_size} ranks>"

    @property
    def complete(self) -> bool:
        """Whether all of its ranks are connected."""
        return len(self.links) == self.world_size

    @property
    def routable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state == "loaded" and self.complete

    @property
    def shown_state(self) -> str:
        """The state for people: a replica that is connected and that no round takes in is ``refused``."""
        return "refused" if self.refusal is not None and self.links else self.state

    @property
    def departed(self) -> bool:
        """Whether every rank was closed on purpose: no round misses such a replica."""
        return not self.links and not self._vanished

    @property
    def missing(self) -> list[int]:
        """The first ranks that are not connected, sixteen at most."""
        return list(islice((rank for rank in range(self.world_size) if rank not in self.links), _SHOWN))

    @property
    def missing_in_words(self) -> str:
        """Those that :attr:`missing` lists, and how many more."""
        more = self.world_size - len(self.links) - _SHOWN
        return ", ".join(map(str, self.missing)) + (f" and {more:,} more" if more > 0 else "")

    def members(self) -> dict[str, Link[EngineNode]]:
        """Its ranks' links by member name, in rank order."""
        return {link.member: link for _, link in sorted(self.links.items())}

    def become(self, state: State, version: Version | None = None, error: str | None = None) -> None:
        """Enter ``state``. Raises :class:`RuntimeError` for a transition that is not in :data:`TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"replica {self.name} cannot go from {self.state} to {state}")
        if (version is not None) != (state == "loaded"):
            raise RuntimeError(f"replica {self.name}: exactly a loaded replica has a version, not a replica that is {state}")
        self.state, self.version, self.error, self.since = state, version, error, time.time()

    def doubt(self, why: str) -> None:
        """What it reports can neither be believed nor refuted now. It is not told, and is believed or distrusted later."""
        if self.state == "loaded":
            self.become("registered", error=why)
        self.error = why

    def attach(self, link: Link[EngineNode]) -> None:
        """A rank joins. Raises :class:`~weightsync.errors.MembershipError` if it does not fit the ranks that are here."""
        rank = link.node.rank
        if rank.world_size != self.world_size:
            raise MembershipError(
                f"{rank.member} says that replica {self.name} has {rank.world_size} ranks, others say {self.world_size}"
            )
        if rank.rank in self.links:
            raise MembershipError(f"rank {rank.rank} of replica {self.name} is connected already, by a process that is still alive")
        if rank.manifest.fingerprint != self.manifest.fingerprint:
            self.manifest.check_same(rank.manifest, f"{rank.member}, unlike the other ranks of its replica,")
        self.links[rank.rank] = link
        self._vanished.discard(rank.rank)
        self.was_complete |= self.complete
        if self.state == "lost":
            self.become("registered", error=self.error)

    def detach(self, link: Link[EngineNode], reason: str, clean: bool = False) -> None:
        """A rank's connection is gone, ``clean`` if it said goodbye: its calls fail, and the replica is lost at once."""
        link.sever(reason)
        if self.links.get(link.node.rank.rank) is link:
            del self.links[link.node.rank.rank]
            if not clean:
                self._vanished.add(link.node.rank.rank)
            if self.state != "lost":
                self.become("lost", error=f"{link.member}: {reason}")

    def begin(self, links: dict[str, Link[EngineNode]]) -> None:
        """An update starts: from here on no rank counts as holding a version.

        Raises :class:`~weightsync.errors.PeerLost` if ``links`` are not the ranks that are connected now.
        """
        self._check_links(links)
        self.become("updating")
        for link in links.values():
            link.serving = None

    def succeed(self, links: dict[str, Link[EngineNode]], version: Version) -> None:
        """Every rank committed ``version`` and was resumed. Raises ``PeerLost`` if a rank went away in the meantime."""
        self._check_links(links)
        self.become("loaded", version)
        for link in links.values():
            link.serving = version

    def fail(self, links: dict[str, Link[EngineNode]], error: str) -> None:
        """The update failed. A replica that was lost, or lost and is being rebuilt from new connections, stays what it is."""
        for link in links.values():
            link.prepared = None
        if self.members() == links and self.state == "updating":
            self.become("dirty", error=error)
        else:
            self.error = error

    def _check_links(self, links: dict[str, Link[EngineNode]]) -> None:
        if self.members() != links:
            raise PeerLost(f"a rank of replica {self.name} went away" + (f" ({self.error})" if self.error else ""))
