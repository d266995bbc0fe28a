"""What both sides agree on before anything is paused: delivery, covers, plan. Pure functions of what the ranks declared."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from weightsync.arrays import UInt64
from weightsync.coordinator.ranks import EngineRank, PublishingRank, unpacked
from weightsync.errors import ConfigurationError, LayoutError, PeerLost
from weightsync.model import Manifest
from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import Coverage, coverage_of
from weightsync.planning.limits import Stop
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Moved, PlanSlice, SourceAddress, Staged

_Bytes = Callable[[int], None]

_PIECE_BYTES, _PIECE_BYTES_FOR_A_DIM = 20, 24
"""Of :class:`~weightsync.protocol.messages.PieceColumns`: two or three 64-bit numbers in each dimension, and what is there once."""
_WHILE_PLANNING = 3
"""A plan that is being made takes so many times what is kept of it: measured, see ``tests/unit/planning/test_limits.py``."""


class MemoryClaim:
    """Memory of the coordinator's that a plan takes, asked for by ``take`` and handed back by ``give`` when the plan is dropped."""

    def __init__(self, take: _Bytes = lambda nbytes: None, give: _Bytes = lambda nbytes: None) -> None:
        self._take, self._give = take, give
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """More of it. Raises :class:`~weightsync.errors.ConfigurationError` if there is not so much."""
        self._take(nbytes)
        self.nbytes += nbytes

    def keep(self, nbytes: int) -> None:
        """Only so much of it from now on."""
        self._give(self.nbytes - nbytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        """The last agreement with this plan is gone."""
        self.keep(0)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """How one replica gets its bytes. Valid for exactly the ranks behind ``key``."""

    key: str
    """Says which source ranks and engine ranks, with which layouts, hosts and offers."""
    delivery: Literal["direct", "streamed"]
    reason: str
    slices: dict[str, PlanSlice]
    """What each rank must know, by member."""
    coverages: tuple[tuple[tuple[str, ...], Coverage], ...]
    """Members whose boxes together are every tensor exactly once: all ranks for direct delivery, each alone for streamed."""
    parties: tuple[PublishingRank | EngineRank, ...]
    """The ranks themselves."""
    claim: MemoryClaim = field(default_factory=MemoryClaim)
    """The memory that ``slices`` takes."""

    def holds_for(self, sources: Mapping[str, PublishingRank], engines: Mapping[str, EngineRank]) -> bool:
        """Return True if the rank objects are identical, that is, if no rank has rejoined."""
        now = (*sources.values(), *engines.values())
        return len(now) == len(self.parties) and all(map(operator.is_, now, self.parties))

    def check(self, answers: Mapping[str, Moved | Staged], expected: UInt64) -> None:
        """Check that what each rank answered, by member, adds up to the ``expected`` digests of the tensors.

        Raises:
            VerificationError: It does not.
        """
        digests = {member: unpacked(answer.digests) for member, answer in answers.items()}
        for members, cover in self.coverages:
            cover.check({member: digests[member] for member in members}, expected)

    @property
    def nbytes(self) -> int:
        """Bytes that the replica's ranks receive."""
        return sum(piece.nbytes for piece in self.slices.values())


def key_of(sources: Mapping[str, PublishingRank], engines: Mapping[str, EngineRank]) -> str:
    """Changes with anything that an agreement depends on: which ranks, their processes, hosts, layouts, offers."""
    readable = [
        (member, rank.hello.session, rank.layout.digest, rank.hello.host, rank.hello.offers, rank.hello.key)
        for member, rank in sorted(sources.items())
    ]
    targets = [
        (
            member, rank.hello.session, rank.layout and rank.layout.digest, rank.hello.device_memory, rank.hello.host,
            rank.hello.delivery, rank.hello.bucket_bytes,
        )
        for member, rank in sorted(engines.items())
    ]  # fmt: skip
    return hashlib.blake2b(repr((readable, targets)).encode(), digest_size=16).hexdigest()


def choose_delivery(
    sources: Mapping[str, PublishingRank], engines: Mapping[str, EngineRank]
) -> tuple[Literal["direct", "streamed"], str]:
    """One delivery for all ranks of a replica, and why.

    ``auto`` is direct where every rank offers a layout, in memory that can be written from where all of the source's is.
    Raises :class:`~weightsync.errors.ConfigurationError` if ranks ask for different ones, or for direct delivery without a layout.
    """
    asked = {rank.hello.delivery for rank in engines.values()} - {"auto"}
    without = [member for member, rank in engines.items() if rank.layout is None]
    if len(asked) > 1:
        raise ConfigurationError(f"ranks {', '.join(engines)} ask for different deliveries: {', '.join(sorted(asked))}")
    if "streamed" in asked:
        return "streamed", "the engine asked for it"
    if "direct" in asked:
        if without:
            raise ConfigurationError(f"direct delivery needs a layout of every rank, and {', '.join(without)} offers none")
        return "direct", "the engine asked for it"
    if without:
        reasons = {engines[member].hello.no_layout for member in without} - {""}
        return "streamed", f"auto: no layout from {', '.join(without)}" + (f" ({'; '.join(sorted(reasons))})" if reasons else "")
    out_of_reach = [
        f"{rank.member} from {source.member}"
        for rank in engines.values()
        for source in sources.values()
        if rank.hello.device_memory and not _writes_on_device(source, rank)
    ]
    if out_of_reach:
        return "streamed", f"auto: GPU memory cannot be written directly at {out_of_reach[0]} (copies, or another host)"
    return "direct", "auto: every rank offers a layout"


def _writes_on_device(source: PublishingRank, engine: EngineRank) -> bool:
    return any(
        "cuda" in offer.traits.writes
        and offer.scheme in engine.hello.transports
        and (offer.traits.reach == "network" or offer.host.name == engine.hello.host.name)
        for offer in source.hello.offers
    )


def source_coverage(manifest: Manifest, sources: Mapping[str, PublishingRank], whose: str, stop: Stop | None = None) -> Coverage:
    """The boxes of the ``sources``. Raises :class:`~weightsync.errors.LayoutError` unless they are every tensor exactly once."""
    return coverage_of(manifest, {member: rank.layout for member, rank in sources.items()}, whose, stop=stop)


def address_of(rank: PublishingRank) -> SourceAddress:
    """How engine ranks reach ``rank``."""
    return SourceAddress(rank.member, rank.layout.digest, rank.hello.offers, rank.hello.key)


def negotiate(
    replica: str,
    sources: Mapping[str, PublishingRank],
    engines: Mapping[str, EngineRank],
    earlier: TransferPlan | None = None,
    claim: MemoryClaim | None = None,
    stop: Stop | None = None,
) -> TransferPlan:
    """Return the agreement for one replica: the ``earlier`` one, if the ranks that rejoined state the same as before.

    Raises :class:`~weightsync.errors.ManifestMismatch`, :class:`~weightsync.errors.LayoutError` or
    :class:`~weightsync.errors.ConfigurationError`, each naming the replica or rank; :class:`~weightsync.errors.PeerLost` without a
    trainer; and :class:`~weightsync.errors.Aborted` soon
    after ``stop`` was set.
    """
    claim, stop = claim or MemoryClaim(), stop or Stop()
    key = key_of(sources, engines)
    parties: tuple[PublishingRank | EngineRank, ...] = (*sources.values(), *engines.values())
    if not sources:
        raise PeerLost(f"no trainer rank is connected any more: nothing can be planned for replica {replica}")
    if earlier is not None and earlier.key == key:
        return replace(earlier, parties=parties)
    if earlier is not None:
        earlier.claim.keep(0)  # it is not used again, and the next one needs its memory
    manifest = next(iter(sources.values())).manifest
    for member, engine in engines.items():
        manifest.check_same(engine.manifest, member)
    delivery, reason = choose_delivery(sources, engines)
    covers: tuple[tuple[tuple[str, ...], Coverage], ...]
    if delivery == "direct":
        layouts = {member: engine.layout for member, engine in engines.items() if engine.layout is not None}
        covers = ((tuple(layouts), coverage_of(manifest, layouts, f"replica {replica}", stop=stop)),)
    else:
        layouts = {member: staging_layout(manifest, engine.hello.bucket_bytes) for member, engine in engines.items()}
        covers = tuple(
            ((member,), coverage_of(manifest, {member: layout}, member, stop=stop)) for member, layout in layouts.items()
        )
    piece = _PIECE_BYTES + _PIECE_BYTES_FOR_A_DIM * manifest.dims
    plan = plan_transfer(
        manifest,
        [SourceRank(member, rank.hello.host, rank.layout) for member, rank in sources.items()],
        [TargetRank(member, engines[member].hello.host, layout) for member, layout in layouts.items()],
        claim=lambda pieces: claim.take(_WHILE_PLANNING * piece * pieces),
        stop=stop,
    )
    slices: dict[str, PlanSlice] = {}
    for member, layout in layouts.items():
        pieces = plan.pieces(member)
        slices[member] = PlanSlice(
            digest=pieces.digest,
            delivery=delivery,
            reason=reason,
            sources=tuple(address_of(sources[name]) for name in pieces.sources),
            layout=layout.to_columns(),
            pieces=pieces.to_columns(),
            nbytes=plan.nbytes(member),
        )
        if slices[member].nbytes != layout.nbytes(manifest):
            raise LayoutError(f"the plan gives {member} {slices[member].nbytes:,} of {layout.nbytes(manifest):,} bytes")
    claim.keep(piece * plan.count)
    agreement = TransferPlan(key, delivery, reason, slices, covers, parties, claim)
    if not agreement.nbytes:
        raise LayoutError(f"the plan moves no bytes to replica {replica}")
    return agreement
