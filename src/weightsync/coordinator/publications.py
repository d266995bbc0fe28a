"""Which version the trainer's shelves hold, and what every copy of it must add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.coordinator.rank_handle import Link
from weightsync.coordinator.ranks import TrainerNode
from weightsync.errors import StaleSource
from weightsync.model import FIRST_EPOCH, Version

__all__ = ["Placement", "Shelves"]

_REMEMBERED = 4096


@dataclass(frozen=True, eq=False)
class Placement:
    """A version as it was placed: digests by tensor (``uint64[tensors]``), and the process behind each trainer rank."""

    version: Version
    digests: npt.NDArray[np.uint64]
    sessions: dict[str, str]
    live: bool = False
    """Whether any of it is a trainer rank's own memory, which is readable only until the publication is over."""


class Shelves:
    """The shelves of all trainer ranks together. They hold one version, or, while one is being placed, none."""

    def __init__(self) -> None:
        self.epoch = FIRST_EPOCH
        """The latest epoch in which anybody is known to have published."""
        self.last = -1
        """The highest version number of that epoch that is known; the next one must be higher."""
        self.published: dict[tuple[int, int], Version] = {}
        """What was published, as far as this coordinator or the trainer knows, by epoch and number; the oldest are forgotten."""
        self._placement: Placement | None = None

    @property
    def known(self) -> bool:
        """Whether any version is known."""
        return self.last >= 0

    def observe(self, epoch: int, number: int) -> None:
        """Somebody knows of a version with this number; -1 is none."""
        if number >= 0:
            self.epoch, self.last = max((self.epoch, self.last), (epoch, number))

    def recall(self, version: Version) -> None:
        """A trainer rank says that it published ``version``, perhaps through an earlier coordinator."""
        self.observe(*version.order)
        self.published.setdefault(version.order, version)

    def last_in(self, epoch: int) -> int:
        """The highest number that is known in ``epoch``, if that is the latest; else -1."""
        return self.last if epoch == self.epoch else -1

    def behind(self, version: Version) -> int:
        """How many publications are newer than ``version``."""
        return sum(order > version.order for order in self.published)

    def clear(self) -> None:
        """Placing begins: what was there is being overwritten."""
        self._placement = None

    def hold(self, placement: Placement) -> None:
        """Every rank has placed: the version exists."""
        self._placement = placement
        self.observe(*placement.version.order)
        self.published[placement.version.order] = placement.version
        while len(self.published) > _REMEMBERED:
            del self.published[next(iter(self.published))]

    def publication_ended(self) -> None:
        """What was read in place cannot be read any more: the trainer goes on with its memory."""
        if self._placement is not None and self._placement.live:
            self._placement = None

    def current(self, trainers: Mapping[str, Link[TrainerNode]]) -> Placement | None:
        """What can be read now from ``trainers``.

        Nothing if a process that placed is gone, even if another took its rank, or if the publication of memory that is read in
        place is over.
        """
        here = {member: link.node.rank.session for member, link in trainers.items()}
        held = self._placement
        return held if held is not None and held.sessions == here else None

    def require(self, trainers: Mapping[str, Link[TrainerNode]]) -> Placement:
        """The same. Raises :class:`~weightsync.errors.StaleSource` if nothing can be read."""
        found = self.current(trainers)
        if not trainers:
            raise StaleSource("no trainer is connected, so no replica can be seeded; a trainer's next publication seeds them")
        if found is None:
            raise StaleSource(
                "no version can be read from the trainer now, so nothing can be seeded; the next publication brings one "
                "(GPU memory that is published in place can be read only until publish returns)"
            )
        return found
