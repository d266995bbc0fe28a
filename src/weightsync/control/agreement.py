"""What both sides agree on before anything is paused: delivery, covers, plan. Pure functions of what the ranks declared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightsync.control.nodes import EngineRank, TrainerRank
from weightsync.errors import ConfigurationError, LayoutError
from weightsync.messages import PlanSlice, SourceAddress
from weightsync.model import Layout, Manifest
from weightsync.planning.buckets import staging_layout
from weightsync.planning.cover import Cover, cover
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer

__all__ = ["Agreement", "agree_on", "choose_delivery", "cover_trainers", "key_of"]

_TRAINER = "the trainer"


@dataclass(frozen=True, eq=False)
class Agreement:
    """How one replica gets its bytes. Valid for exactly the ranks behind ``key``."""

    key: str
    """Says which trainer ranks and engine ranks, with which layouts, hosts and offers."""
    delivery: Literal["direct", "streamed"]
    reason: str
    slices: dict[str, PlanSlice]
    """What each rank must know, by member."""
    covers: tuple[tuple[tuple[str, ...], Cover], ...]
    """Members whose boxes together are every tensor exactly once: all ranks for direct delivery, each alone for streamed."""

    @property
    def nbytes(self) -> int:
        """Bytes that the replica's ranks receive."""
        return sum(piece.nbytes for piece in self.slices.values())


def key_of(trainers: Mapping[str, TrainerRank], engines: Mapping[str, EngineRank]) -> str:
    """Changes with anything that an agreement depends on: which ranks, their processes, hosts, layouts, offers."""
    sources = [
        (member, rank.session, rank.layout.digest, rank.host, rank.offers, rank.key) for member, rank in sorted(trainers.items())
    ]
    targets = [
        (member, rank.session, rank.layout and rank.layout.digest, rank.host, rank.delivery, rank.bucket_bytes)
        for member, rank in sorted(engines.items())
    ]
    return hashlib.blake2b(repr((sources, targets)).encode(), digest_size=16).hexdigest()


def choose_delivery(engines: Mapping[str, EngineRank]) -> tuple[Literal["direct", "streamed"], str]:
    """One delivery for all ranks of a replica, and why.

    ``auto`` is direct where every rank offers a layout. Raises :class:`~weightsync.errors.ConfigurationError` if ranks ask for
    different ones, or for direct delivery without a layout.
    """
    asked = {rank.delivery for rank in engines.values()} - {"auto"}
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
        return "streamed", f"auto: no layout from {', '.join(without)}"
    return "direct", "auto: every rank offers a layout"


def cover_trainers(manifest: Manifest, trainers: Mapping[str, TrainerRank]) -> Cover:
    """The trainer's boxes. Raises :class:`~weightsync.errors.LayoutError` unless they are every tensor exactly once."""
    return cover(manifest, {member: rank.layout for member, rank in trainers.items()}, _TRAINER)


def _address(rank: TrainerRank) -> SourceAddress:
    return SourceAddress(rank.member, rank.layout.digest, rank.offers, rank.key)


def agree_on(replica: str, trainers: Mapping[str, TrainerRank], engines: Mapping[str, EngineRank]) -> Agreement:
    """The agreement for one replica.

    Raises :class:`~weightsync.errors.ManifestMismatch`, :class:`~weightsync.errors.LayoutError` or
    :class:`~weightsync.errors.ConfigurationError`, each naming the replica or rank.
    """
    manifest = next(iter(trainers.values())).manifest
    for member, engine in engines.items():
        manifest.check_same(engine.manifest, member)
    delivery, reason = choose_delivery(engines)
    layouts: dict[str, Layout] = {}
    covers: tuple[tuple[tuple[str, ...], Cover], ...]
    if delivery == "direct":
        layouts = {member: engine.layout for member, engine in engines.items() if engine.layout is not None}
        covers = ((tuple(layouts), cover(manifest, layouts, f"replica {replica}")),)
    else:
        layouts = {member: staging_layout(manifest, engine.bucket_bytes) for member, engine in engines.items()}
        covers = tuple(((member,), cover(manifest, {member: layout}, member)) for member, layout in layouts.items())
    plan = plan_transfer(
        manifest,
        [SourceRank(member, rank.host, rank.layout) for member, rank in trainers.items()],
        [TargetRank(member, engines[member].host, layout) for member, layout in layouts.items()],
    )
    slices: dict[str, PlanSlice] = {}
    for member, layout in layouts.items():
        pieces = plan.pieces(member)
        slices[member] = PlanSlice(
            digest=pieces.digest,
            delivery=delivery,
            reason=reason,
            sources=tuple(_address(trainers[name]) for name in pieces.sources),
            layout=layout.to_columns(),
            pieces=pieces.to_columns(),
            nbytes=plan.nbytes(member),
        )
        if slices[member].nbytes != layout.nbytes(manifest):
            raise LayoutError(f"the plan gives {member} {slices[member].nbytes:,} of {layout.nbytes(manifest):,} bytes")
    agreement = Agreement(key_of(trainers, engines), delivery, reason, slices, covers)
    if not agreement.nbytes:
        raise LayoutError(f"the plan moves no bytes to replica {replica}")
    return agreement
