"""What the trainer stores of its versions: the coordinator gathers the ranks' parts, signs the manifest, and knows the newest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import structs

from weightsync.arrays import UInt64
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.publications import Placement, Publications
from weightsync.coordinator.rank_handle import RoundDeadline, bounded, in_thread
from weightsync.coordinator.ranks import PublishingRank, TrainerRank
from weightsync.errors import ConfigurationError, ProtocolError, RoundFailed, StaleSource, VersionError, WeightSyncError
from weightsync.model import Version
from weightsync.model.stored import StoredObject, StoredRank, VersionManifest
from weightsync.protocol.messages import PROTOCOL, Body, Done, Hello, Host, Offer, Traits
from weightsync.protocol.store_messages import STORE, ManifestStored, SignedManifest, StoreAddress, StorePart
from weightsync.store.signing import SigningKey, StoredVersion, opened

STORE_SECONDS = 30.0
"""Until a replica that could not read from the store is seeded again: there may be no trainer that publishes a next version."""
_FIRST = "trainer/0"


class _PartsOfVersion:
    """The parts of one version, and what its ranks wait for."""

    def __init__(self, placement: Placement, ranks: dict[str, TrainerRank]) -> None:
        self.placement, self.ranks = placement, ranks
        self.chains: dict[str, tuple[StoredObject, ...]] = {}
        self.signed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: WeightSyncError) -> None:
        for future in (self.signed, self.written):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may have no reader


@dataclass(frozen=True, eq=False)
class StoredSource:
    """A stored version to read: its digests, and ranks that stand for those that stored it."""

    version: Version
    digests: UInt64
    ranks: dict[str, PublishingRank]


class StoredVersions:
    """Gathers and signs manifests. Only what the trainer's ranks placed here is signed, with the digests that they computed then.

    Args:
        members: All members of the run.
        publications: The version that the trainer holds.
        make_key: Returns the run's key; called once, in a thread. ``None``: this coordinator signs nothing.
    """

    def __init__(self, members: Membership, publications: Publications, make_key: Callable[[], SigningKey] | None) -> None:
        self._members, self._publications, self._make_key = members, publications, make_key
        self._gathering: _PartsOfVersion | None = None
        self.newest: StoredVersion | None = None
        """The newest version in the store, as far as this coordinator knows."""
        self.source: StoredSource | None = None
        """The same, to be read."""
        self.read: Callable[[], Coroutine[None, None, str]] | None = None
        """Adopts the newest version in the store, or returns why that cannot be read. ``None`` once it was, or without a store."""
        self._reading: asyncio.Task[str] | None = None

    @cached_property
    def key(self) -> SigningKey:
        """The run's key. Raises :class:`~weightsync.errors.ConfigurationError` if there is none."""
        if self._make_key is None:
            raise ConfigurationError("this coordinator has no key to sign stored versions with")
        return self._make_key()

    async def catch_up(self, limit: RoundDeadline) -> None:
        """Learn of the newest version in the store, if it was not read yet, and nothing else says which numbers were used.

        Raises:
            RoundFailed: It cannot be read.
        """
        if self.read is None or not self._publications.unsure:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self.read())
        await asyncio.wait([self._reading], timeout=limit.left)
        if why := self._reading.result() if self._reading.done() else "it does not answer":
            raise RoundFailed(
                f"nothing was published: the number must be above those in the store, which cannot be read ({why}). Publish again "
                "when it can be, or start the coordinator without WEIGHTSYNC_STORE"
            )
        self.read = None

    async def part(self, member: str, part: StorePart, limit: RoundDeadline) -> Body:
        """Take the part of a trainer rank, and wait for the others' as :class:`~weightsync.protocol.store_messages.StorePart` says.

        Raises:
            StaleSource: That version is not what the trainer holds, a later one was published, or another rank dropped it.
            DeadlineExceeded: ``limit`` passed.
        """
        gathering = self._joined(member, (part.epoch, part.number))
        gathering.chains[member] = part.chain
        try:
            if gathering.chains.keys() == gathering.ranks.keys():
                signed = await in_thread("signing a stored version", limit, lambda: self._signed(gathering, part.step))
                if not gathering.signed.done():
                    gathering.signed.set_result(signed)
            if member == _FIRST:
                data = await bounded("the other ranks' parts of a stored version", limit, asyncio.shield(gathering.signed))
                return SignedManifest(data, self.key.public)
            await bounded("the manifest of a stored version", limit, asyncio.shield(gathering.written))
        except WeightSyncError as error:
            gathering.fail(error)
            raise
        return Done()

    def _joined(self, member: str, order: tuple[int, int]) -> _PartsOfVersion:
        placement, trainers = self._publications.current(self._members.trainers), self._members.trainers
        now = self._gathering
        if now is not None and now.placement.version.order == order and member in trainers:
            if member not in now.ranks or trainers[member].rank.hello.session != now.ranks[member].hello.session:
                raise StaleSource(f"another process was {member} when version {order[1]} was published")
            return now
        if placement is None or placement.version.order != order or member not in placement.sessions:
            raise StaleSource(f"version {order[1]} of epoch {order[0]} is not what the trainer holds now")
        if now is not None:
            now.fail(StaleSource("a rank did not store that version, and the next one was published"))
        self._gathering = _PartsOfVersion(placement, {name: link.rank for name, link in trainers.items()})
        return self._gathering

    def _signed(self, gathering: _PartsOfVersion, step: int | None) -> bytes:
        members = sorted(gathering.ranks, key=lambda member: gathering.ranks[member].hello.rank)
        chains, placement = gathering.chains, gathering.placement
        extended = any(len(chain) > 1 for chain in chains.values())
        manifest = VersionManifest(
            version=placement.version,
            tensors=gathering.ranks[_FIRST].manifest.tensors,
            digests=placement.digests.astype("<u8").tobytes(),
            ranks=tuple(StoredRank(gathering.ranks[member].layout.to_columns(), chains[member]) for member in members),
            stored=time.time(),
            step=step,
            base=self.newest.version if extended and self.newest is not None else None,
        )
        return self.key.signed(manifest)

    async def written(self, member: str, stored: ManifestStored, limit: RoundDeadline) -> None:
        """The manifest that was signed last is in the store.

        Raises:
            ProtocolError: ``member`` is not rank 0, or nothing was signed for it.
            VersionError: It is that of another version.
        """
        gathering = self._gathering
        if member != _FIRST or gathering is None or not gathering.signed.done():
            raise ProtocolError(f"{member} was given no manifest to store")
        version, data = gathering.placement.version, gathering.signed.result()
        if version.order != (stored.epoch, stored.number):
            raise VersionError(f"version {version} was to be stored, not version {stored.number} of epoch {stored.epoch}")
        order = version.order
        read = await in_thread("reading a manifest", limit, lambda: opened(data, self.key.public, version.run, order))
        self._gathering = None
        self.adopt(read, stored.url)
        if not gathering.written.done():
            gathering.written.set_result(None)

    def adopt(self, stored: StoredVersion, url: str) -> None:
        """Let replicas be seeded with a version whose manifest in the store at ``url`` was signed with the run's key.

        That counts as the word of the trainer ranks that placed it: nothing else is signed.
        """
        version, host = stored.version, Host(STORE, STORE)
        hello = Hello(
            protocol=PROTOCOL, run=version.run, role="trainer", name=STORE, rank=0, world_size=len(stored.layouts),
            session=version.digest, host=host, pid=0, manifest=(), key=self.key.public,
        )  # fmt: skip
        ranks = {}
        for rank, layout in enumerate(stored.layouts):
            address = msgspec.json.encode(StoreAddress(url, version.run, *version.order, rank)).decode()
            offer = Offer(STORE, address, host, Traits(reads=(), encrypted=True))
            ranks[f"{STORE}/{rank}"] = PublishingRank(structs.replace(hello, rank=rank, offers=(offer,)), stored.manifest, layout)
        self.newest, self.source = stored, StoredSource(version, stored.digests, ranks)
        self._publications.published.setdefault(version.order, version)
        self._publications.claim("trainer", STORE, *version.order)
