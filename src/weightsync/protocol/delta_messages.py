"""Messages of rounds that move only what changed between two versions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.model.version import Version
from weightsync.protocol.fields import Epoch, Many, Message, Number


class ChangedWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a trainer rank lists its words that differ from those of a version before, the *base*.

    See :mod:`weightsync.tensors.changes`. Offsets are bytes from the beginning of ``region``, one of the rank's.
    """

    epoch: Epoch
    """Epoch of the base."""
    number: Number
    """Number of the base."""
    region: Number
    sections: Number
    """Offset of the description of the sections."""
    shards: Number
    """Number of sections."""
    counts: Number
    """Offset of the counts."""
    payload: Number
    """Offset of the lists."""
    units: Number
    """4-byte units of the lists."""
    changed: Number
    """Words that changed, for display."""
    words: Number
    """Words of the rank's shards, for display."""


class Stage(Message, frozen=True):
    """Prepare, while still serving ``base``, for what changed between it and version ``number``. Answered by :class:`Staged`.

    With direct delivery the changes of ``sources`` are fetched. With streamed delivery only tensors are moved later whose
    ``digests`` are others than those that this rank has received.
    """

    number: Number
    base: Version
    sources: Annotated[tuple[ChangedWords, ...], Many]
    """In the order of the plan's sources; empty with streamed delivery."""
    digests: bytes = b""
    """Of every tensor of the new version (uint64, little-endian), with streamed delivery."""


class Staged(Message, frozen=True):
    """The changes are here: ``nbytes`` of lists. With streamed delivery: so many bytes of tensors will be moved.

    ``digests`` are those of every row of the plan's layout (uint64, little-endian) as they will be: the base's, and what the
    changes will add to them.
    """

    nbytes: Number
    digests: bytes


class Revert(Message, frozen=True):
    """Put back the words of ``base`` that staged changes replaced. Answered by :class:`Done`; then the rank may resume with it."""

    base: Version


DeltaMessage = Stage | Staged | Revert
