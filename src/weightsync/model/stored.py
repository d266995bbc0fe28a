"""A version in a store: its manifest names the immutable objects that hold it. Plain data, see :mod:`weightsync.store`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.model.layout import LayoutColumns
from weightsync.model.manifest import MAX_BYTES, TensorSpec
from weightsync.model.version import Version

CHUNK_BYTES = 4 << 20
"""Bytes of an object that have one SHA-256, and are read together. The last chunk of an object may be shorter."""
STORED_BLOCK = 8192
"""An object's data begins at a multiple of this: the bytes whose changes are listed together."""

_MOST_OBJECTS = 1024
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}"
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object of the store: a safetensors file whose data begins at byte ``data``."""

    path: Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}(/{_NAME}){{0,3}}\Z")]
    kind: Literal["key", "delta"]
    """A key frame holds the rank's shards, a delta the words that changed since the object before it."""
    nbytes: _Bytes
    data: _Bytes
    hashes: bytes
    """SHA-256 of each chunk."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // CHUNK_BYTES)


class StoredRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trainer rank's part of a version: a key frame, and deltas in the order in which they are applied to it."""

    layout: LayoutColumns
    chain: Annotated[tuple[StoredObject, ...], msgspec.Meta(min_length=1, max_length=_MOST_OBJECTS)]


class VersionManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All about one version. It does not refer to other manifests: what it needs of earlier versions is in its chains."""

    version: Version
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=1 << 20)]
    digests: bytes
    """Digest of each tensor (uint64, little-endian)."""
    ranks: Annotated[tuple[StoredRank, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]
    stored: float
    """When it was made, in seconds since 1970."""
    step: int | None = None
    base: Version | None = None
    """The version before, if a rank stored what changed since then."""
    format: Literal[1] = 1
