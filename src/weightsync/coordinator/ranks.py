"""Ranks that the coordinator controls: what they say of themselves, how they are called, and whether an answer can be right."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np

from weightsync.arrays import UInt64
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError, readable
from weightsync.model import Layout, Manifest
from weightsync.model.lora import LoraConfig, lora_modules
from weightsync.protocol import messages

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class _KnownRank:
    hello: messages.Hello
    """What the rank said of itself when it joined, validated. Its session and credential, which are secrets, are hashes."""
    manifest: Manifest

    @property
    def member(self) -> str:
        """Name of the rank, unique among all ranks of the run."""
        return f"{self.hello.name}/{self.hello.rank}"


@dataclass(frozen=True)
class PublishingRank(_KnownRank):
    """A rank from which engine ranks can read: of the trainer, or of a replica that serves its weights to others."""

    layout: Layout
    """Of the memory that is read."""


class TrainerRank(PublishingRank):
    """A trainer rank."""


@dataclass(frozen=True)
class AdapterRank(TrainerRank):
    """A rank of a trainer that publishes LoRA adapters. Ranks with the same name are one source."""

    limits: str = ""
    """Patterns of the only names that its token admits to, separated by commas; empty: all."""

    def check(self, name: str) -> None:
        """Raise :class:`~weightsync.errors.AuthenticationError` unless this rank may publish and retire adapters of this name."""
        if self.limits and not any(fnmatchcase(name, pattern) for pattern in self.limits.split(",")):
            raise AuthenticationError(f"{name} is not among the adapters that this token admits to: {self.limits}")

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(module.name for module in lora_modules(self.manifest))

    def check_scalings(self, config: LoraConfig) -> None:
        """Raise :class:`~weightsync.errors.ConfigurationError` unless ``config`` scales modules of this rank's adapter only.

        Every engine that serves it keeps the configuration, and repeats it when it joins.
        """
        if strange := sorted(config.scalings.keys() - self._modules) if config.scalings else []:
            raise ConfigurationError(f"the adapter has no module {readable(strange[0], 200)}, for which a scaling is given")


@dataclass(frozen=True)
class EngineRank(_KnownRank):
    """An engine rank."""

    layout: Layout | None
    source: PublishingRank | None = None
    """What other replicas can read from it; ``None`` if it does not serve its weights."""


def known_as(secret: str) -> str:
    """Return what the coordinator keeps of a secret of a rank: enough to know it again, and nothing that could be shown instead."""
    return hashlib.sha256(secret.encode()).hexdigest()


class RankNode(Protocol[R_co]):
    """A connected rank. The server implements it over a WebSocket, tests implement it in-process."""

    @property
    def rank(self) -> R_co:
        """Self-description of the rank."""

    async def call(self, body: messages.Body, timeout: float) -> messages.Body:
        """Send ``body`` and return the rank's answer, or raise its error, within ``timeout`` seconds.

        What each message asks for and which one answers it is documented with the messages. The caller enforces its own deadline
        as well.
        """

    def notify(self, text: str) -> None:
        """Show ``text`` in the rank's log. Returns at once, before delivery."""

    def dismiss(self, reason: str) -> None:
        """Close this connection and tell its process why. Returns at once."""


def check_answer(rank: TrainerRank | EngineRank, message: messages.Body, answer: messages.Body) -> None:
    """Check that ``answer``, which is of the right kind, is of the size that ``message`` asks for. Plans are known to rounds only.

    Raises:
        ProtocolError: It is not, or a text in it is not printable.
    """
    match message, answer:
        case messages.Place() | messages.DigestUnderKey(), messages.Placed():
            source: PublishingRank | None = rank.source if isinstance(rank, EngineRank) else rank
            check_digests(rank.member, answer.digests, 0 if source is None else len(source.layout), "rows")
            if any(words.shards > (0 if source is None else len(source.layout)) for words in answer.changed):
                raise ProtocolError(f"{rank.member} lists changes of more shards than it has")
        case messages.PlaceWindow(), messages.WindowPlaced():
            if len(answer.digests) != 8 * len(answer.parts) or not 0 <= answer.nbytes <= message.window_bytes:
                raise ProtocolError(f"{rank.member} described a window of {answer.nbytes:,} bytes wrongly")
        case messages.MoveWindow(), messages.WindowMoved():
            check_digests(rank.member, answer.digests, len(message.placed.parts), "tensors")
        case messages.Prepare() | messages.OpenStream(), messages.Prepared():
            sources = len(message.plan.sources if isinstance(message, messages.Prepare) else message.sources)
            if len(answer.transports) > sources:
                raise ProtocolError(f"{rank.member} names {len(answer.transports)} transports for {sources} sources")
            if not all(map(str.isprintable, (answer.digest, *answer.transports))):
                raise ProtocolError(f"{rank.member} sent a plan digest or transport name that is not printable")


def check_digests(member: str, packed: bytes, count: int, of: str) -> None:
    """Raise :class:`~weightsync.errors.ProtocolError` unless ``packed`` are ``count`` digests."""
    if len(packed) != 8 * count:
        raise ProtocolError(f"{member} sent {len(packed)} bytes of digests, expected 8 for each of {count} {of}")


def unpacked(digests: bytes) -> UInt64:
    """Digests of a message, as ``uint64[count]``."""
    return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False)
