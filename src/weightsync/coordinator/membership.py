"""Trainer ranks and replicas that are connected, checked when they join. Bookkeeping only; nothing is awaited.

What a rank says of itself alone was checked before: see :func:`weightsync.coordinator.agent_messages.rank_of`.
"""

from __future__ import annotations

import secrets
import time
from itertools import islice
from typing import Any

from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import EngineRank, RankNode, TrainerRank, known_as
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.status import RankStatus
from weightsync.errors import AuthenticationError, ManifestMismatch, MembershipError
from weightsync.model import Manifest, Version

_SHOWN_MISSING = 16
_REMEMBERED_LOST = 64  # replicas without any connection that status still shows
_REMEMBERED_REVOKED = 4096


class Membership:
    """The trainer's ranks and the replicas, by name. What is revoked is shared with the members ``base``, if they are given."""

    def __init__(self, base: Membership | None = None) -> None:
        self.trainers: dict[str, RankHandle[TrainerRank]] = {}
        self.replicas: dict[str, Replica] = {}
        self.trainer_expected = 0
        """Number of ranks of the trainer that is connected, or was the last to be."""
        self.gone_trainers: dict[int, RankStatus] = {}
        """Trainer ranks whose connection ended other than on purpose and that have not come back."""
        self.refused_trainers: dict[int, str] = {}
        """Trainer ranks that are missing because they hold other tensors, until a publication that waits for them has failed."""
        self._lost: dict[str, Replica] = {}
        self._revoked: dict[str, None] = {} if base is None else base._revoked
        """SHA-256 hashes of revoked credentials and sessions, oldest first."""

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the trainer; ``None`` while no trainer rank is connected."""
        return next((link.rank.manifest for link in self.trainers.values()), None)

    @property
    def streams(self) -> bool:
        """Whether the trainer publishes streams, whose tensors are not known before."""
        return any(link.rank.hello.window_bytes for link in self.trainers.values())

    @property
    def world_size(self) -> int:
        """Number of trainer ranks; 0 while no trainer rank is connected."""
        return next((link.rank.hello.world_size for link in self.trainers.values()), 0)

    def taking_part(self, served: Version | None = None) -> list[Replica]:
        """Replicas that a round updates: they match the trainer's manifest, have lost no rank, and do not serve ``served``."""
        matching = (replica for replica in self.replicas.values() if replica.state != "lost" and replica.refusal is None)
        return [replica for replica in matching if served is None or replica.version != served]

    def left_out(self, served: Version | None = None) -> list[Replica]:
        """Replicas that such a round misses because they are lost or refused, or serve ``served``; none that has left."""
        taken = set(self.taking_part(served))
        return [replica for replica in self.replicas.values() if replica not in taken and not replica.departed]

    def trainers_in_order(self) -> dict[str, RankHandle[TrainerRank]]:
        """The trainer's ranks by rank: windows of a stream name their source by its place."""
        return dict(sorted(self.trainers.items(), key=lambda item: item[1].rank.hello.rank))

    def missing_trainers(self, present: set[str]) -> list[int]:
        """First sixteen trainer ranks that are not among the ``present`` members."""
        ranks = {self.trainers[member].rank.hello.rank for member in present if member in self.trainers}
        return list(islice((rank for rank in range(self.world_size) if rank not in ranks), _SHOWN_MISSING))

    def add_trainer(self, node: RankNode[TrainerRank]) -> RankHandle[TrainerRank]:
        """Add a trainer rank. A stale connection of the same process is replaced.

        Raises:
            MembershipError: The rank is in use by another live process, or the world size differs from other ranks'.
            ManifestMismatch: The rank holds other tensors than the other trainer ranks.
            AuthenticationError: The rank's credential was revoked.
        """
        rank, hello = node.rank, node.rank.hello
        others = [link for member, link in self.trainers.items() if member != rank.member]
        held = self.trainers.get(rank.member)
        credential = self._admit(node, held)
        for other in others:
            theirs = other.rank.hello
            if theirs.world_size != hello.world_size:
                raise MembershipError(
                    f"{rank.member} reports {hello.world_size} trainer ranks, but {other.member} reports {theirs.world_size}: "
                    "is a second trainer running?"
                )
            if theirs.windows != hello.windows:
                raise MembershipError(f"{rank.member} and {other.member} of the trainer do not publish the same kind of stream")
            try:
                other.rank.manifest.check_same(rank.manifest, f"{rank.member}, unlike {other.member},")
            except ManifestMismatch as error:
                self.refused_trainers[hello.rank] = str(error)
                raise
        if held is not None:
            held.sever(_replaced(node))
            held.node.dismiss(_replaced(node))
        link: RankHandle[TrainerRank] = RankHandle(node, credential)
        self.trainers[rank.member] = link
        if hello.world_size != self.trainer_expected:
            self.gone_trainers.clear()
        self.trainer_expected = hello.world_size
        self.gone_trainers.pop(hello.rank, None)
        self.refused_trainers.pop(hello.rank, None)
        for replica in self.replicas.values():
            self._validate(replica)
        return link

    def add_engine(self, node: RankNode[EngineRank]) -> tuple[Replica, RankHandle[EngineRank]]:
        """Add an engine rank to its replica. The first rank creates the replica.

        A replica that does not hold the trainer's tensors is kept but refused, see :attr:`Replica.refusal`.

        Raises:
            MembershipError: The rank is in use by another live process, or the world size differs from other ranks'.
            ManifestMismatch: The rank holds other tensors than the replica's other ranks.
            AuthenticationError: The rank's credential was revoked.
        """
        rank, hello = node.rank, node.rank.hello
        replica = self.replicas.get(hello.name)
        held = None if replica is None else replica.links.get(hello.rank)
        credential = self._admit(node, held)
        if replica is not None:
            if held is not None:
                replica.detach(held, _replaced(node))
                held.node.dismiss(_replaced(node))
            if not replica.links and (replica.world_size != hello.world_size or replica.manifest != rank.manifest):
                replica = None  # same name, different engine
        if replica is None:
            replica = Replica(hello.name, hello.world_size, rank.manifest, takes_any=hello.takes_any)
        link: RankHandle[EngineRank] = RankHandle(node, credential)
        replica.attach(link)
        self.replicas[hello.name] = replica
        self._lost.pop(hello.name, None)
        self._validate(replica)
        return replica, link

    def find(self, member: str) -> RankHandle[Any]:
        """Return the handle of the connected rank ``member``.

        Raises:
            MembershipError: The rank is not connected.
        """
        links: dict[str, RankHandle[Any]] = dict(self.trainers)
        for replica in self.replicas.values():
            links |= replica.members()
        if member not in links:
            raise MembershipError(f"{member!r} is not connected; these ranks are: {', '.join(links) or 'none'}")
        return links[member]

    def revoke(self, link: RankHandle[Any]) -> None:
        """Refuse the credential and the session of ``link`` from now on.

        The session is refused as well because the Welcome with the credential may have been lost.
        """
        self._revoked.update({known_as(link.credential): None, link.rank.hello.session: None})
        while len(self._revoked) > _REMEMBERED_REVOKED:
            del self._revoked[next(iter(self._revoked))]

    def _admit(self, node: RankNode[Any], held: RankHandle[Any] | None) -> str:
        """Return the credential for a rank that joins. ``held`` is the connection that now occupies its place, if any."""
        rank = node.rank
        if not self._revoked.keys().isdisjoint({rank.hello.credential, rank.hello.session}):
            raise AuthenticationError(f"the credential of {rank.member} was revoked: restart its process to join again")
        if held is None:
            return secrets.token_urlsafe(32)
        if not held.gives_way_to(node):
            theirs = held.rank.hello
            raise MembershipError(
                f"{rank.member} is already connected from process {theirs.pid} on {theirs.host.name}, which is still alive; only "
                "that process may reconnect. A run has one trainer, a replica name belongs to one engine, and each rank joins "
                f"once. End that process, or release the rank with `weightsync revoke {rank.member}`"
            )
        return held.credential

    def remove(self, node: RankNode[Any], reason: str, clean: bool = False) -> bool:
        """Remove this connection.

        Args:
            node: The connection. One that has been replaced is ignored.
            reason: Why the connection closed.
            clean: Whether the agent closed it on purpose.

        Returns:
            Whether the connection was still in use.
        """
        member = node.rank.member
        trainer = self.trainers.get(member)
        if trainer is not None and trainer.node is node:
            del self.trainers[member]
            trainer.sever(reason)
            if not self.trainers:
                self.refused_trainers.clear()
            if not clean:
                self.gone_trainers[trainer.rank.hello.rank] = trainer.status(ended=time.time())
            elif not self.trainers and not self.gone_trainers:
                self.trainer_expected = 0
            return True
        replica = self.replicas.get(node.rank.hello.name) if isinstance(node.rank, EngineRank) else None
        link = None if replica is None else replica.links.get(node.rank.hello.rank)
        if replica is None or link is None or link.node is not node:
            return False
        replica.detach(link, reason, clean)
        if not replica.links:
            self._evict(replica)
        return True

    def _validate(self, replica: Replica) -> None:
        """Set :attr:`Replica.refusal` by comparing the replica's manifest with the trainer's."""
        refusal = None
        if self.manifest is not None and (self.streams or replica.takes_any):
            refusal = self._unfit(replica)
        elif self.manifest is not None:
            try:
                self.manifest.check_same(replica.manifest, f"replica {replica.name}")
            except ManifestMismatch as error:
                refusal = f"ManifestMismatch: {error}"
        if replica.links and (refusal is not None or replica.refusal is not None):
            replica.error = refusal
        replica.refusal = refusal

    def _unfit(self, replica: Replica) -> str | None:
        """Why a replica cannot take part in streams, or a receiver in anything else."""
        if not self.streams:
            return (
                "ManifestMismatch: it takes the tensors of a stream, as a weightsync.Stream without deltas sends them, and this "
                "trainer publishes shards\nto receive these, "
                "make it with Receiver(manifest=weightsync.manifest_of(module)), and restart it"
            )
        direct = [member for member, link in replica.members().items() if link.rank.hello.delivery == "direct"]
        advice = 'with deltas=True join after the first publish_stream, or use delivery="auto"'
        text = "asks for direct delivery, and a stream goes through loaders"
        return f"ConfigurationError: {direct[0]} {text}: {advice}" if direct else None

    def _evict(self, lost: Replica) -> None:
        """Drop a replica that has no connections. One that was complete or refused stays in the status for a while."""
        if not lost.was_complete and lost.refusal is None:
            del self.replicas[lost.name]
            return
        self._lost.pop(lost.name, None)
        self._lost[lost.name] = lost
        for name in list(self._lost)[:-_REMEMBERED_LOST]:
            replica = self._lost.pop(name)
            if not replica.links and self.replicas.get(name) is replica:
                del self.replicas[name]


def _replaced(node: RankNode[Any]) -> str:
    hello = node.rank.hello
    return f"{node.rank.member} connected again, from process {hello.pid} on {hello.host.name}"
