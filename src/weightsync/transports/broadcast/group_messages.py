"""Messages of ``collective`` and ``nccl`` beside the common ones."""

from __future__ import annotations

import msgspec

from weightsync.transports.net.messages import ControlMessage, Fail, Messages, Ready, RegisterTiles, Start


class Warmup(ControlMessage, frozen=True):
    """Of ``nccl``, before anything is paused: let the group connect within ``seconds``; answered by :class:`JoinEpoch` and an end.

    Or by the end alone, where other readers want the same: with whom a group is made is known when they begin.
    """

    seconds: float


class JoinEpoch(ControlMessage, frozen=True):
    """Of ``collective`` and ``nccl``, to a :class:`Start`: the broadcast begins, to all readers in this epoch's group.

    A reader that is in another epoch's group leaves it and joins this one, as ``rank`` of ``size``, at ``port`` of the publisher.
    Buckets have at most ``buffer_bytes`` bytes, header included. The publisher gives the broadcast up after ``seconds``.
    """

    epoch: str
    rank: int
    size: int
    port: int
    buffer_bytes: int
    seconds: float


MESSAGES: Messages = msgspec.msgpack.Decoder(RegisterTiles | Start | Ready | Fail | Warmup | JoinEpoch)
