"""What was published: a run, an increasing number, and the digests that every copy must add up to."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Version", "fold"]


def fold(digests: npt.NDArray[np.uint64]) -> str:
    """One printable digest (16 hexadecimal digits, BLAKE2b-64) of the per-tensor digests, ``uint64[tensors]``."""
    return hashlib.blake2b(np.ascontiguousarray(digests, "<u8").tobytes(), digest_size=8).hexdigest()


class Version(msgspec.Struct, frozen=True):
    """A published set of weights. Immutable: the same run and number always mean the same bytes."""

    run: str
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    manifest: str
    """Fingerprint of the manifest."""
    digest: str
    """:func:`fold` of the per-tensor digests."""

    def __str__(self) -> str:
        return f"{self.run}@{self.number}"
