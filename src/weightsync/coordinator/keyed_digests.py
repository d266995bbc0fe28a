"""Digests of a version under secret keys: the check of replicas that read from other replicas.

The digest of a version has public constants, so a replica that serves its weights could compute other bytes with the same digest.
A replica that reads from a replica is therefore compared with what the trainer's ranks hold under a fresh key
(:class:`~weightsync.tensors.digest.DigestConstants`). The trainer's ranks and that one reader get the key; no source ever does, and
a key is used once, so a key that a reader passes on is useless.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field

from weightsync.arrays import UInt64
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.rank_handle import RoundDeadline, in_thread, on_all, ranks_of
from weightsync.coordinator.ranks import unpacked
from weightsync.errors import StaleSource, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import DigestUnderKey, Placed

_log = logging.getLogger(__name__)

KEPT = 4
"""Keyed digests of a publication that are kept for the time when the trainer cannot be asked: each admits one reader."""
_KEY_BYTES = 32
_KEEPING_SECONDS = 10.0  # that a publication waits for them


@dataclass(frozen=True, eq=False)
class KeyedDigests:
    """A secret key, and the digest of each tensor of a version under it, ``uint64[tensors]``."""

    key: bytes = field(repr=False)
    digests: UInt64


class KeyedDigester:
    """Asks the trainer's ranks for keyed digests, and keeps a few of the last publication.

    Args:
        members: All members of the run.
        planner: Knows the coverage of the trainer.
    """

    def __init__(self, members: Membership, planner: Planner) -> None:
        self._members, self._planner = members, planner
        self._version: Version | None = None
        self._kept: list[KeyedDigests] = []
        self._readers: set[str] = set()
        """Replicas that took one of these. The last one is left for others."""

    def has(self, version: Version | None) -> bool:
        """Whether digests of ``version`` are kept, or there is a trainer to ask."""
        return bool(self._members.trainers) or (self._version == version and bool(self._kept))

    @property
    def allows_repetition(self) -> bool:
        """Whether a reader that failed may take another of those that are kept: at least half of them are for others."""
        return len(self._kept) > KEPT // 2

    async def draw(self, version: Version, deadline: RoundDeadline, reader: str) -> KeyedDigests:
        """Return the digests of ``version`` under a key that was never used: from the trainer, otherwise one that was kept.

        Raises:
            StaleSource: The trainer does not hold the version any more, or did not answer, and none is left for replica ``reader``.
        """
        try:
            return await self._ask(version, RoundDeadline(deadline.remaining("a keyed digest") / 2))
        except WeightSyncError as error:
            if self._version == version and self._kept and (reader not in self._readers or len(self._kept) > 1):
                self._readers.add(reader)
                return self._kept.pop()
            raise StaleSource(
                f"replicas cannot be compared with version {version}, so they read it from the trainer only, or wait for the next "
                f"publication: the trainer cannot digest it now ({error}), and the {KEPT} keyed digests that are kept of a "
                "publication are used up, were not taken, or are left for other replicas"
            ) from None

    async def keep(self, version: Version, deadline: RoundDeadline) -> None:
        """Take the digests to keep of ``version``, whose publication ends now, if a replica serves its weights to others.

        Afterwards the trainer may change its memory, or leave.
        """
        self._version, self._kept, self._readers = version, [], set()
        links = [link for replica in self._members.replicas.values() for link in replica.links.values()]
        if self._members.streams or not any(link.rank.source is not None for link in links):
            return
        try:
            limit = RoundDeadline(min(_KEEPING_SECONDS, deadline.remaining("keyed digests")))
            while len(self._kept) < KEPT:
                self._kept.append(await self._ask(version, limit))
        except WeightSyncError as error:
            _log.warning("%d of %d keyed digests of version %s are kept: %s", len(self._kept), KEPT, version, error)

    async def _ask(self, version: Version, deadline: RoundDeadline) -> KeyedDigests:
        trainers = self._members.trainers_in_order()
        if not trainers:
            raise StaleSource("no trainer is connected")
        key, (epoch, number) = secrets.token_bytes(_KEY_BYTES), version.order
        ranks = ranks_of(trainers)
        manifest = next(iter(ranks.values())).manifest
        if manifest.fingerprint != version.manifest:
            raise StaleSource("the trainer holds other tensors")
        cover = await self._planner.cover(manifest, ranks, deadline)
        answers = await on_all("digest", deadline, trainers, DigestUnderKey(number, epoch, key), Placed)
        rows = {member: unpacked(placed.digests) for member, placed in answers.items()}
        return KeyedDigests(key, await in_thread("adding up keyed digests", deadline, lambda: cover.total(rows)))
