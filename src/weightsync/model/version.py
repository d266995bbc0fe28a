"""Identity of published weights: a run, an epoch, an increasing number, and digests."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import msgspec
import numpy as np

from weightsync.arrays import UInt64

FIRST_EPOCH = 1
"""First epoch of a run. In a later epoch a trainer may reuse numbers of earlier epochs."""

_EPOCH_SUFFIX = re.compile(r"\.([1-9][0-9]{0,8})\Z")
_LABEL = re.compile(r"(?:(.*)@)?([0-9]{1,19})", re.DOTALL)


def fold(digests: UInt64) -> str:
    """Hash the per-tensor digests, ``uint64[tensors]``, to 16 hexadecimal digits (BLAKE2b-64)."""
    return hashlib.blake2b(np.ascontiguousarray(digests, "<u8").tobytes(), digest_size=8).hexdigest()


def label_of(run: str, epoch: int, number: int) -> str:
    """Return the label of a version: ``run@400`` in the first epoch, ``run.2@400`` in the second.

    If the run's id itself ends in a dot and a number, its label always contains the epoch, so that no label is ambiguous.
    """
    plain = epoch == FIRST_EPOCH and _EPOCH_SUFFIX.search(run) is None
    return f"{run}@{number}" if plain else f"{run}.{epoch}@{number}"


def parse_label(label: str) -> tuple[str | None, int, int] | None:
    """Return the run (``None`` for a bare number), epoch and number of a label; ``None`` if the text is not a label."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    run, number = match[1], int(match[2])
    suffix = _EPOCH_SUFFIX.search(run or "")
    if run is None or suffix is None:
        return run, FIRST_EPOCH, number
    return run[: suffix.start()], int(suffix[1]), number


class Version(msgspec.Struct, frozen=True):
    """A published set of weights. Immutable: the same run, epoch and number always mean the same bytes."""

    run: str
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    manifest: str
    """Fingerprint of the manifest."""
    digest: str
    """:func:`fold` of the per-tensor digests."""
    epoch: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] = FIRST_EPOCH
    """Versions are ordered by epoch, then by number. See ``Trainer(..., new_epoch=True)``."""

    def __str__(self) -> str:
        return label_of(self.run, self.epoch, self.number)

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and number, by which versions of one run are ordered."""
        return self.epoch, self.number
