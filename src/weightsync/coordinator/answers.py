"""Answers of ranks, checked when they arrive."""

from __future__ import annotations

import numpy as np

from weightsync.arrays import UInt64
from weightsync.coordinator.ranks import EngineRank, PublishingRank, TrainerRank
from weightsync.errors import ProtocolError
from weightsync.protocol.messages import (
    Body,
    DigestUnderKey,
    MoveWindow,
    OpenStream,
    Place,
    Placed,
    PlaceWindow,
    Prepare,
    Prepared,
    WindowMoved,
    WindowPlaced,
)


def check_answer(rank: TrainerRank | EngineRank, message: Body, answer: Body) -> None:
    """Check that ``answer``, which is of the right kind, is of the size that ``message`` asks for. Plans are known to rounds only.

    Raises:
        ProtocolError: It is not, or a text in it is not printable.
    """
    match message, answer:
        case Place() | DigestUnderKey(), Placed():
            source: PublishingRank | None = rank.source if isinstance(rank, EngineRank) else rank
            check_digests(rank.member, answer.digests, 0 if source is None else len(source.layout), "rows")
            if any(words.shards > (0 if source is None else len(source.layout)) for words in answer.changed):
                raise ProtocolError(f"{rank.member} lists changes of more shards than it has")
        case PlaceWindow(), WindowPlaced():
            if len(answer.digests) != 8 * len(answer.parts) or not 0 <= answer.nbytes <= message.window_bytes:
                raise ProtocolError(f"{rank.member} described a window of {answer.nbytes:,} bytes wrongly")
        case MoveWindow(), WindowMoved():
            check_digests(rank.member, answer.digests, len(message.placed.parts), "tensors")
        case Prepare() | OpenStream(), Prepared():
            sources = len(message.plan.sources if isinstance(message, Prepare) else message.sources)
            if len(answer.transports) > sources:
                raise ProtocolError(f"{rank.member} names {len(answer.transports)} transports for {sources} sources")
            if not all(map(str.isprintable, (answer.digest, *answer.transports))):
                raise ProtocolError(f"{rank.member} sent a plan digest or transport name that is not printable")
        case _:
            pass


def check_digests(member: str, packed: bytes, count: int, of: str) -> None:
    """Raise :class:`~weightsync.errors.ProtocolError` unless ``packed`` are ``count`` digests."""
    if len(packed) != 8 * count:
        raise ProtocolError(f"{member} sent {len(packed)} bytes of digests, expected 8 for each of {count} {of}")


def unpacked(digests: bytes) -> UInt64:
    """Digests of a message, as ``uint64[count]``."""
    return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False)
