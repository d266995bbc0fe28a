"""What a server knows of its committed versions: which label the next one has, and the digests of the last one."""

from __future__ import annotations

import re

import numpy as np

from weightsync.arrays import Bools, UInt64
from weightsync.errors import ConfigurationError, VerificationError, few
from weightsync.model import FIRST_EPOCH, Manifest, Version, parse_label


def parse_version(label: str | None, run: str, last: int, epoch: int = FIRST_EPOCH) -> tuple[str, int, int]:
    """Run, number and epoch of a label: ``"7"``, ``"my-run@7"``, ``"my-run.2@7"``.

    Without a label it is the number after ``last``. What the label does not say is ``run`` and ``epoch``.

    Raises :class:`~weightsync.errors.ConfigurationError` for anything else.
    """
    if label is None:
        return run, last + 1, epoch
    parsed = parse_label(label) if re.fullmatch(r"(?:[A-Za-z0-9_.:/-]{1,200}@)?[0-9]{1,18}", label) else None
    if parsed is None or parsed[0] == "":
        raise ConfigurationError(f"{label!r} is not a version; write a number, RUN@NUMBER or RUN.EPOCH@NUMBER")
    named, parsed_number, number = parsed
    return (run, number, epoch) if named is None else (named, number, parsed_number)


class Committed:
    """The digest of every tensor of the last committed version, so that a partial update can name the whole."""

    def __init__(self) -> None:
        self._digests = np.zeros(0, np.uint64)
        self._verified = np.zeros(0, np.bool_)

    def complete(self, manifest: Manifest, held: UInt64, known: Bools) -> UInt64:
        """The digests of all tensors: of those that were sent as they are ``held``, of the others as they were committed.

        Raises :class:`~weightsync.errors.VerificationError` if a tensor that was not sent could be read back and has changed.
        """
        if known.all():
            return held
        before = self._digests
        changed = np.flatnonzero(~known & (held != 0) & (held != before))
        if len(changed):
            names = [manifest[int(index)].name for index in changed]
            raise VerificationError(f"{len(names)} tensors changed that were not sent: {few(names)}; send all tensors")
        return np.where(known, held, before)

    def describe_rest(self, known: Bools, last: Version | None, *, read_again: bool) -> str:
        """For people: what is known of the tensors that were not sent; empty if all were."""
        rest = int((~known).sum())
        if not rest:
            return ""
        how = "read again and unchanged" if read_again else "not read again"
        bare = int((~known & ~self._verified).sum())
        return f"; the other {rest} are those of {last}, {how}" + (f", {bare} of them never verified" if bare else "")

    def take(self, digests: UInt64, known: Bools, *, verified: bool) -> None:
        """These ``digests`` are committed; ``known`` says which tensors were sent."""
        before = self._verified if len(self._verified) else np.zeros(len(known), np.bool_)
        self._digests, self._verified = digests, np.where(known, verified, before)
