"""Tensors that the replicas hold, for trainers that publish what is served."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from weightsync.model import Manifest, TensorSpec

SERVED_PATH, MOST_SECONDS = "/v1/served", 86400


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of one replica. All others hold the same."""

    replica: str
    tensors: tuple[TensorSpec, ...]


@lru_cache(1)
def encode_served(replica: str, manifest: Manifest) -> bytes:
    """Return the JSON of a :class:`Served`; made once for all trainer ranks that ask at the same time."""
    return msgspec.json.encode(Served(replica, manifest.tensors))
