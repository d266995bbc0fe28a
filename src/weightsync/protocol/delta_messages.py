"""Messages of rounds that move only what changed between two versions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.model.version import Version
from weightsync.protocol.update_messages import Message

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Epoch = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Many = msgspec.Meta(max_length=1 << 20)


class ChangedWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a trainer rank lists its words that differ from those of a version before, the *base*.

    See :mod:`weightsync.tensors.changes`. Offsets are bytes from the beginning of ``region``, one of the rank's.
    """

    epoch: _Epoch
    """Epoch of the base."""
    number: _Number
    """Number of the base."""
    region: _Number
    sections: _Number
    """Offset of the description of the sections."""
    shards: _Number
    """Number of sections."""
    counts: _Number
    """Offset of the counts."""
    payload: _Number
    """Offset of the lists."""
    units: _Number
    """4-byte units of the lists."""
    changed: _Number
    """Words that changed, for display."""
    words: _Number
    """Words of the rank's shards, for display."""


class Stage(Message, frozen=True):
    """Fetch, while still serving ``base``, what changed between it and version ``number``. Answered by :class:`Staged`."""

    number: _Number
    base: Version
    sources: Annotated[tuple[ChangedWords, ...], _Many]
    """In the order of the plan's sources."""


class Staged(Message, frozen=True):
    """The changes are here: ``nbytes`` of lists.

    ``digests`` are those of every row of the plan's layout (uint64, little-endian) as they will be: the base's, and what the
    changes will add to them.
    """

    nbytes: int
    digests: bytes


class Revert(Message, frozen=True):
    """Put back the words of ``base`` that staged changes replaced. Answered by :class:`Done`; then the rank may resume with it."""

    base: Version


DeltaMessage = Stage | Staged | Revert
