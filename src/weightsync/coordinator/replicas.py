"""One serving engine of one or more ranks: the unit of pause, commit, health and version.

The record of the looks at what a replica serves: it outlives rounds and connections, and so does the bound on their share.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from weightsync.coordinator.publications import Publications
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import EngineRank
from weightsync.coordinator.status import RankStatus, ReplicaGauges, ReplicaStatus
from weightsync.errors import MembershipError, PeerLost, WeightSyncError, few
from weightsync.model import SERVICE, Manifest, Version

_MOST_ALARMS = 64


@dataclass
class Looks:
    """Times are the event loop's. A look that is withdrawn or fails took its time, too."""

    task: asyncio.Task[Any] | None = None
    """Waits for the next look, and carries it out."""
    holds: int = 0
    """Rounds that forbid looks now: it is updated, or others read from it."""
    failures: int = 0
    """Looks without a result, one after the other."""
    ended: float = -math.inf
    """End of the last look."""
    seconds: float = 0.0
    """Duration of the last look."""
    alarms: set[str] = field(default_factory=set)
    """Differences that were found in one version."""
    alarmed: Version | None = None
    """That version."""
    restless: Version | None = None
    """A version of which the same tensors differed again after it had been installed again."""
    _started: float | None = None

    @property
    def running(self) -> float:
        """Seconds of the look that runs; 0 if none does."""
        return 0.0 if self._started is None else asyncio.get_running_loop().time() - self._started

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Look in the block."""
        self._started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.seconds, self._started = self.running, None
            self.ended = asyncio.get_running_loop().time()

    def alarm(self, version: Version, why: str) -> bool:
        """Note a difference. Returns whether the same was found before, since when the version has been installed again."""
        if self.alarmed != version or len(self.alarms) >= _MOST_ALARMS:  # a stolen rank may invent some for ever
            self.alarmed, self.alarms = version, set()
        again = why in self.alarms
        self.alarms.add(why)
        return again


_SHOWN = 16
_REFUSAL_SECONDS = 3600.0

State = Literal["registered", "loaded", "updating", "dirty", "lost"]

TRANSITIONS: dict[State, frozenset[State]] = {
    "registered": frozenset({"updating", "loaded", "dirty", "lost"}),  # loaded, dirty: by what its ranks report on joining
    # dirty: its version was published with another digest; registered: the published digest is unknown
    "loaded": frozenset({"updating", "dirty", "lost", "registered"}),
    "updating": frozenset({"loaded", "dirty", "lost"}),
    "dirty": frozenset({"updating", "lost"}),  # never directly to loaded
    "lost": frozenset({"registered"}),
}
"""Allowed successors of each state; any other transition raises. ``loaded`` is serving, ``dirty`` is out of service."""


class Replica:
    """State of one replica, as the coordinator knows it.

    =========== ===================================================================================================
    state       meaning
    =========== ===================================================================================================
    registered  some of its ranks are not connected yet, or it has no version, or none that can be trusted
    loaded      it serves ``version``: every rank verified and committed it. The only state that receives requests
    updating    a round has paused it
    dirty       a round failed in it, or it held other bytes than its version's: paused until a later round succeeds
    lost        a rank's connection is gone
    =========== ===================================================================================================
    """

    def __init__(self, name: str, world_size: int, manifest: Manifest, *, takes_any: bool = False) -> None:
        self.name = name
        self.takes_any = takes_any
        """Whether it takes whatever tensors a stream brings."""
        self.url = ""
        """Where routers reach it, as its first rank says; empty if it does not say."""
        self.draining = False
        """Whether it serves on, but should get no more requests because it is about to be paused."""
        self.world_size = world_size
        self.manifest = manifest
        self.links: dict[int, RankHandle[EngineRank]] = {}
        self.state: State = "registered"
        self.version: Version | None = None
        self.since = time.time()
        """Time of the last state change, in seconds since the Unix epoch; for display."""
        self.error: str | None = None
        """Why the last update failed; ``None`` after a success."""
        self.refusal: str | None = None
        """Why rounds leave the replica out (its tensors differ from the trainer's); ``None`` if they do not."""
        self.gone: dict[int, RankStatus] = {}
        """Where each missing rank ran, for display."""
        self._ended_refused = False
        """Whether it was refused when its last connection ended. Later trainers do not refuse what has left."""
        self.verified = ""
        """How the version was verified."""
        self.paused_seconds: float | None = None
        """Pause of its last update."""
        self._vanished: dict[int, float] = {}
        """Ranks whose connection broke and that have not reconnected, with the event loop's time of the loss."""
        self.phases: dict[str, float] = {}
        """Seconds by phase of the last round in which it took part."""
        self.received: dict[str, int] = {}
        """Bytes of the running move that are in place, by member."""
        self.expected = 0
        """Bytes of the whole move, summed over its ranks."""
        self.was_complete = False
        """Whether all of its ranks have been connected at the same time."""
        self.preparing: asyncio.Task[Any] | None = None
        """Task that prepares the next round while no round runs. That round waits for it."""
        self.quarantining: asyncio.Task[Any] | None = None
        """Quarantine outside any round. The next round waits for it."""
        self.looks = Looks()
        """The background audits of what it serves."""
        self.fed_by = ""
        """Name of the source of its last update, for which its ranks are prepared."""
        self.refuted_by: set[str] = set()
        """Replicas that read its version from it and then held other bytes, and itself once it says that it does not serve that
        version. Emptied when it has verified a version again."""

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state} {self.version or 'without version'} {len(self.links)}/{self.world_size} ranks>"

    @property
    def complete(self) -> bool:
        """Whether all ranks are connected."""
        return len(self.links) == self.world_size

    @property
    def routable(self) -> bool:
        """Whether requests may be sent to the replica."""
        return self.serves and not self.draining

    @property
    def serves(self) -> bool:
        """Whether all ranks serve its version."""
        return self.state == "loaded" and self.complete

    @property
    def readable(self) -> bool:
        """Whether others may read its version from it: every rank serves it, to requests and to replicas; no reader refuted it."""
        serving = self.serves and self.refusal is None and not self.refuted_by
        return serving and all(link.rank.source is not None for link in self.links.values())

    @property
    def refuted(self) -> str:
        """What a rank found in its parameters instead of what it installed; empty if no rank of it has found anything."""
        return next((link.refuted for link in self.links.values() if link.refuted), "")

    @property
    def restless(self) -> bool:
        """Whether parameters of the version that it serves were found to change by themselves: it is not audited."""
        return self.version is not None and self.version == self.looks.restless

    @property
    def shown_state(self) -> str:
        """State for display: ``refused`` if rounds leave it out, ``left`` if it was closed; otherwise ``state``.

        A refusal is shown for an hour after the replica's end: the engine's process usually ends by it.
        """
        if self.refusal is not None and (self.links or (self._ended_refused and time.time() - self.since < _REFUSAL_SECONDS)):
            return "refused"
        return "left" if self.state == "lost" and self.departed else self.state

    @property
    def shown_error(self) -> str | None:
        """Error for display."""
        shown = self.shown_state
        return None if shown == "left" else self.refusal if shown == "refused" else self.error

    @property
    def departed(self) -> bool:
        """Whether every rank was closed on purpose. Rounds do not miss such a replica."""
        return not self.links and not self._vanished

    @property
    def vanished_at(self) -> float | None:
        """Time, on the event loop's clock, at which the first of its missing connections broke; ``None`` if none did."""
        return min(self._vanished.values(), default=None)

    @property
    def missing(self) -> list[int]:
        """First sixteen ranks that are not connected."""
        return list(islice((rank for rank in range(self.world_size) if rank not in self.links), _SHOWN))

    @property
    def missing_in_words(self) -> str:
        """The ranks in :attr:`missing`, and the number of further missing ranks."""
        return few(map(str, self.missing), _SHOWN, total=self.world_size - len(self.links))

    def require_complete(self) -> None:
        """Raise WeightSyncError if a rank is missing."""
        if self.missing:
            raise WeightSyncError(
                f"replica {self.name} is not complete: rank {self.missing_in_words} of {self.world_size} is missing"
            )

    def members(self) -> dict[str, RankHandle[EngineRank]]:
        """Handles of its ranks by member name, in rank order."""
        return {link.member: link for _, link in sorted(self.links.items())}

    def become(self, state: State, version: Version | None = None, error: str | None = None) -> None:
        """Enter ``state``.

        Raises:
            RuntimeError: :data:`TRANSITIONS` does not allow it, or ``version`` is given for a state other than ``loaded``.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"replica {self.name} cannot go from {self.state} to {state}")
        if (version is not None) != (state == "loaded"):
            raise RuntimeError(f"replica {self.name}: exactly a loaded replica has a version, not one that is {state}")
        self.state, self.version, self.error, self.since = state, version, error, time.time()

    def doubt(self, why: str) -> None:
        """Withdraw trust in the version that the replica reports, without pausing it. A later check trusts or quarantines it."""
        if self.state == "loaded":
            self.become("registered", error=why)
        self.error = why

    def attach(self, link: RankHandle[EngineRank]) -> None:
        """Add a rank that has joined and is not connected already.

        Raises:
            MembershipError: Its world size differs from the replica's.
            ManifestMismatch: The rank holds other tensors than the replica's other ranks.
        """
        rank, hello = link.rank, link.rank.hello
        if hello.world_size != self.world_size:
            raise MembershipError(
                f"{rank.member} reports {hello.world_size} ranks for replica {self.name}, but other ranks report {self.world_size}"
            )
        self.manifest.check_same(rank.manifest, f"{rank.member}, unlike the other ranks of its replica,")
        self.links[hello.rank] = link
        self.url = next((other.rank.hello.url for other in self.members().values() if other.rank.hello.url), "")
        self._vanished.pop(hello.rank, None)
        self.gone.pop(hello.rank, None)
        self.was_complete |= self.complete
        if self.state == "lost":
            self.become("registered", error=self.error)

    def detach(self, link: RankHandle[EngineRank], reason: str, clean: bool = False) -> None:
        """Remove a rank whose connection is gone. Its calls fail, and the replica is lost at once.

        Args:
            link: The rank's handle.
            reason: Why the connection ended.
            clean: Whether the rank closed it on purpose.
        """
        link.sever(reason)
        if self.links.get(link.rank.hello.rank) is link:
            del self.links[link.rank.hello.rank]
            self._ended_refused = self.refusal is not None
            self.gone[link.rank.hello.rank] = link.status(ended=time.time())
            if not clean:
                self._vanished[link.rank.hello.rank] = asyncio.get_running_loop().time()
            if self.state != "lost":
                self.become("lost", error=f"{link.member}: {reason}")

    def begin(self, links: dict[str, RankHandle[EngineRank]]) -> None:
        """Start an update: from here on no rank counts as holding a version.

        Raises:
            PeerLost: ``links`` are not the ranks that are connected now.
        """
        self.require_links(links)
        self.become("updating")
        for link in links.values():
            link.serving, link.refuted = None, ""

    def succeed(self, links: dict[str, RankHandle[EngineRank]], version: Version) -> None:
        """End an update: every rank committed ``version`` and was resumed.

        A rank that has closed its connection on purpose since, as a receiver does at the end of its loop, had the version.

        Raises:
            PeerLost: A rank vanished in the meantime, or reconnected.
        """
        if self.state != "lost" or self._vanished or not self.members().items() <= links.items():
            self.require_links(links)
            self.become("loaded", version)
        self.refuted_by.clear()
        for link in links.values():
            link.serving = version

    def fail(self, links: dict[str, RankHandle[EngineRank]], error: str) -> None:
        """End an update with ``error``: the replica is out of service (``dirty``), unless it was lost or has reconnected."""
        for link in links.values():
            link.prepared = None
        if self.members() == links and self.state == "updating":
            self.become("dirty", error=error)
        else:
            self.error = error

    def require_links(self, links: Mapping[str, RankHandle[EngineRank]]) -> None:
        """Raise :class:`~weightsync.errors.PeerLost` unless ``links`` are the ranks that are connected now."""
        if self.members() != links:
            raise PeerLost(f"a rank of replica {self.name} disconnected" + (f" ({self.error})" if self.error else ""))


def replica_gauges(replica: Replica, publications: Publications) -> ReplicaGauges:
    """Metrics of a replica."""
    number = None if replica.version is None else replica.version.number
    return ReplicaGauges(replica.name, replica.shown_state, number, publications.behind(replica.version), replica.since)


def replica_status(replica: Replica, publications: Publications) -> ReplicaStatus:
    """Status of a replica."""
    version = replica.version
    return ReplicaStatus(
        name=replica.name,
        state=replica.shown_state,
        routable=replica.routable,
        version=None if version is None else version.number,
        digest=None if version is None else version.digest,
        staleness=None if version is None else publications.behind(version),
        since=replica.since,
        world_size=replica.world_size,
        missing=tuple(replica.missing),
        ranks=tuple(link.status() for _, link in sorted(replica.links.items())),
        adapter=next((link.rank.hello.adapter for link in replica.links.values()), ""),
        error=replica.shown_error,
        phases=dict(replica.phases),
        epoch=None if version is None else version.epoch,
        service=SERVICE.get(replica.shown_state, replica.shown_state),
        gone=tuple(rank for _, rank in sorted(replica.gone.items())),
        verified=replica.verified if version is not None else "",
        paused_seconds=replica.paused_seconds,
        url=replica.url,
        restless=replica.restless,
    )


def reported_version(replica: Replica, run: str) -> Version | None:
    """Version of ``run`` that all ranks of ``replica`` report; ``None`` if they differ, or if a round has touched a rank since."""
    reported = {link.serving for link in replica.links.values()}
    version = reported.pop() if len(reported) == 1 else None
    if version is None or not replica.complete or replica.state not in ("registered", "loaded"):
        return None
    same = replica.takes_any or version.manifest == replica.manifest.fingerprint
    return version if version.run == run and same else None


def validate(replicas: Iterable[Replica], run: str, order: tuple[int, int], published: Version | None) -> list[tuple[Replica, str]]:
    """Mark replicas that report the ``published`` version as loaded, and return those that report another digest.

    A replica that claims another digest must not take the others out of service. While the published digest is unknown, replicas
    that differ are neither trusted nor paused: the trainer confirms one when it reconnects, or publishes the next version.

    Args:
        replicas: All known replicas.
        run: Name of the run.
        order: Epoch and number of the version in question.
        published: The version published under ``order``; ``None`` if it is unknown.

    Returns:
        Each replica that reports a wrong digest, with the reason.
    """
    reporting = [(replica, version) for replica in replicas if (version := reported_version(replica, run))]
    reports = [(replica, version) for replica, version in reporting if version.order == order]
    if published is None and len({version for _, version in reports}) > 1:
        for replica, version in reports:
            replica.doubt(f"replicas report version {version} with different digests, and the trainer has not confirmed any")
        return []
    wrong = []
    for replica, version in reports:
        if published is not None and version != published:
            wrong.append((replica, f"version {version} was published with a digest other than {version.digest}"))
        elif replica.state == "registered":
            replica.become("loaded", version)
    return wrong
