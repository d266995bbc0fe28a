"""Epochs of version numbers, so that a trainer restarted from an earlier checkpoint can use its numbers again."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.coordinator.publications import Publications
from weightsync.coordinator.ranks import TrainerRank
from weightsync.errors import VersionError
from weightsync.model import FIRST_EPOCH

REMEDY = (
    "publish() without a number takes the next one; a trainer that resumes from an earlier checkpoint can reuse numbers with "
    "Trainer(..., new_epoch=True) on every rank"
)
"""What to do about a version number that is too small. Error messages end with it."""
_LAST_EPOCH = (1 << 31) - 1  # messages have no room for a later one


class Epochs:
    """Grants one new epoch to each set of trainer processes that asks for one.

    Grants survive a restart of either side: this object remembers them by process, and trainer ranks report theirs
    (``Hello.epoch``). While only engine ranks know a version, grants do not bind: the trainer follows what the engines report.
    """

    def __init__(self, publications: Publications) -> None:
        self._publications = publications
        self._granted: dict[str, int] = {}

    def last(self, rank: TrainerRank) -> int:
        """Highest known version number in the epoch of ``rank``; -1 if there is none."""
        epoch = self.of(rank)
        return -1 if epoch is None else self._publications.last_in(epoch)

    def of(self, rank: TrainerRank) -> int | None:
        """Epoch in which ``rank`` publishes; ``None`` if the rank asked for a new epoch that has not been granted."""
        epoch = self._granted_to(rank)
        return self._publications.epoch if epoch is None and not rank.hello.new_epoch else epoch

    def decide(self, ranks: Sequence[TrainerRank]) -> int:
        """Return the epoch in which all ``ranks`` of a trainer publish, granting a new one if they ask for it.

        Raises:
            VersionError: The ranks disagree about the epoch, a later epoch has begun, or the last one has.
        """
        asking = [rank.member for rank in ranks if rank.hello.new_epoch]
        if asking and len(asking) < len(ranks):
            others = ", ".join(rank.member for rank in ranks if not rank.hello.new_epoch)
            raise VersionError(
                f"trainer ranks differ: {', '.join(asking)} asked for a new epoch, {others} did not; give new_epoch to all or none"
            )
        held = {rank.member: epoch for rank in ranks if (epoch := self._granted_to(rank)) is not None}
        if len(set(held.values())) > 1:
            listed = ", ".join(f"{member} in epoch {epoch}" for member, epoch in held.items())
            raise VersionError(f"trainer ranks publish in different epochs: {listed}; restart all ranks of the trainer")
        current = self._publications.epoch
        if held:
            epoch = next(iter(held.values()))
            if epoch < current:
                raise VersionError(
                    f"this trainer publishes in epoch {epoch}, but epoch {current} has begun: another trainer replaced it. Stop "
                    "this one, or restart it with Trainer(..., new_epoch=True)"
                )
        else:
            epoch = current if not asking else current + 1 if self._publications.known else FIRST_EPOCH
        if epoch > _LAST_EPOCH:
            raise VersionError(f"epoch {current} is the last one: no new epoch can begin. Start another run (WEIGHTSYNC_RUN)")
        self._granted = {rank.hello.session: epoch for rank in ranks}
        return epoch

    def _granted_to(self, rank: TrainerRank) -> int | None:
        if self._publications.witness:
            return None  # nothing was published in any grant, and the next epoch may be a false claim
        return self._granted.get(rank.hello.session) or rank.hello.epoch or None
