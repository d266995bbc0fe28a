"""The version that the trainer's published regions hold, the digests that every copy must match, and epochs of version numbers.

In a new epoch a trainer that was restarted from an earlier checkpoint can use its numbers again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync.arrays import UInt64
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import TrainerRank
from weightsync.errors import StaleSource, VersionError
from weightsync.model import FIRST_EPOCH, Version
from weightsync.model.window import KnownWindows, Measured, measured
from weightsync.protocol.messages import ChangedWords, Placed

_REMEMBERED = 4096
_MOST_CLAIMED_NUMBER = 1 << 62
_MOST_CLAIMED_EPOCH = 1 << 30
REMEDY = (
    "publish() without a number takes the next one; a trainer that resumes from an earlier checkpoint can reuse numbers with "
    "Trainer(..., new_epoch=True) on every rank"
)
"""What to do about a version number that is too small. Error messages end with it."""
_LAST_EPOCH = (1 << 31) - 1  # messages have no room for a later one


@dataclass(frozen=True, eq=False)
class Delta:
    """Where each trainer rank, by member, lists what changed since the version ``base``."""

    base: Version
    changed: dict[str, ChangedWords]

    @property
    def share(self) -> float:
        """The part of all words that changed."""
        return sum(each.changed for each in self.changed.values()) / max(sum(each.words for each in self.changed.values()), 1)


@dataclass(frozen=True, eq=False)
class Placement:
    """A placed version: its digest for each tensor (``uint64[tensors]``), and the process behind each trainer rank."""

    version: Version
    digests: UInt64
    sessions: dict[str, str]
    live: bool = False
    """Whether part of it is a trainer rank's own memory, which is readable only during the publication."""
    deltas: tuple[Delta, ...] = ()
    """What changed since earlier versions, the last one first, where that is listed."""


class Publications:
    """Published regions of all trainer ranks together. They hold one version, or none while one is being placed."""

    def __init__(self) -> None:
        self.own = FIRST_EPOCH, -1
        """Epoch and number of the newest version that was published here."""
        self._claims: dict[str, dict[str, tuple[int, int]]] = {"trainer": {}, "engine": {}}
        """Newest versions that connected ranks report, by member."""
        self.newest = self.own
        """Epoch and number of the newest known version, see :meth:`claim`."""
        self.published: dict[tuple[int, int], Version] = {}
        """Published versions by epoch and number, as far as the coordinator or the trainer knows them. The oldest are dropped."""
        self.promised: Version | None = None
        """What the publication that runs must become, by a signature."""
        self.windows = KnownWindows[Measured](lambda parts, _: measured(parts))
        """Those of the stream that was published last."""
        self.reserved: set[tuple[int, int]] = set()
        """Epochs and numbers of publications that run."""
        self._placement: Placement | None = None
        self._order = 0

    @property
    def epoch(self) -> int:
        """Latest epoch in which a version is known to have been published."""
        return self.newest[0]

    @property
    def last(self) -> int:
        """Highest known version number of that epoch; the next one must be higher."""
        return self.newest[1]

    @property
    def witness(self) -> str:
        """Engine rank that alone says that the newest version exists; empty if it was published here, or a trainer rank says so."""
        engines = self._claims["engine"]
        return next((member for member, claimed in engines.items() if claimed == self.newest), "") if self.unsure else ""

    @property
    def unsure(self) -> bool:
        """Whether no version was published here, and no trainer rank, nor a stored version, says which was the last."""
        return self.own[1] < 0 and not self._claims["trainer"]

    def claim(self, role: Literal["trainer", "engine"], member: str, epoch: int, number: int) -> None:
        """Record that a rank reports a version as published through an earlier coordinator. -1 stands for none.

        A report is a claim, which any process with a token can make. It lasts until :meth:`withdraw`. An engine rank's claim counts
        only while neither this coordinator nor a trainer rank knows any version. Numbers and epochs without room above them are
        ignored.
        """
        if 0 <= number <= _MOST_CLAIMED_NUMBER and epoch <= _MOST_CLAIMED_EPOCH:
            self._claims[role][member] = epoch, number
            if role == "trainer" or self.unsure:
                self._look()

    def withdraw(self, member: str) -> None:
        """Drop the claims of a rank that has left."""
        if any([claims.pop(member, None) for claims in self._claims.values()]):
            self._look()

    def _look(self) -> None:
        claims = self._claims["engine" if self.unsure else "trainer"]
        self.newest = max((self.own, *claims.values()))

    def last_in(self, epoch: int) -> int:
        """Highest known number in ``epoch`` if that is the latest epoch; else -1."""
        return self.last if epoch == self.epoch else -1

    def highest_in(self, epoch: int) -> int:
        """As :meth:`last_in`, with those whose bytes are known from a rank that has left, and those of publications that run.

        One of its ranks may have been interrupted since.
        """
        known = [number for other, number in self.published if other == epoch and number <= _MOST_CLAIMED_NUMBER]
        return max([self.last_in(epoch), *known, *(number for other, number in self.reserved if other == epoch)])

    def behind(self, version: Version | None) -> int:
        """Number of known publications that are newer than ``version``; of all, for a replica that serves none."""
        return len(self.published) if version is None else sum(order > version.order for order in self.published)

    def clear(self) -> None:
        """Drop the placement, because its regions are about to be overwritten."""
        self._placement = None

    def placed_before(self, order: int) -> None:
        """Choose only orders above this one, which an earlier coordinator has used. One without room above it is ignored."""
        if order <= _MOST_CLAIMED_NUMBER:
            self._order = max(self._order, order)

    def next_order(self) -> int:
        """Return a number above those of all earlier placings. It follows the clock, as earlier coordinators' did."""
        self._order = max(self._order + 1, time.time_ns() // 1000)
        return self._order

    def hold(self, placement: Placement) -> None:
        """Record a placement that every rank has completed.

        Raises:
            VersionError: Its number means other bytes already.
        """
        version = placement.version
        others = (known for known in (self.published.get(version.order), self.promised) if known is not None)
        if any(known.order == version.order and known != version for known in others):
            raise VersionError(f"version {version} was published with another digest already, so this one does not exist")
        if version.order >= self.own:  # sources of one adapter place beside each other
            self._placement, self.own = placement, version.order
            self._look()
        self.published[version.order] = version
        while len(self.published) > _REMEMBERED:
            del self.published[next(iter(self.published))]

    def use(self, epoch: int, number: int) -> None:
        """Use this number and those before it for no later version."""
        self.own = max(self.own, (epoch, number))
        self._look()

    def deltas(self, placed: Mapping[str, Placed]) -> tuple[Delta, ...]:
        """What all trainer ranks list as changed since the same versions, which were published here."""
        lists: dict[tuple[int, int], dict[str, ChangedWords]] = {}
        for member, answer in placed.items():
            for words in answer.changed:
                lists.setdefault((words.epoch, words.number), {})[member] = words
        bases = sorted((order for order, changed in lists.items() if len(changed) == len(placed)), reverse=True)
        return tuple(Delta(self.published[order], lists[order]) for order in bases if order in self.published)

    def publication_ended(self) -> None:
        """Drop a placement that is read in place, because the trainer now changes its memory."""
        if self._placement is not None and self._placement.live:
            self._placement = None

    def current(self, trainers: Mapping[str, RankHandle[TrainerRank]]) -> Placement | None:
        """Placement that can be read now from ``trainers``, or ``None``.

        There is none if a process that placed it is gone, even if another took its rank. There is none if it was read in place and
        its publication is over.
        """
        sessions = {member: link.rank.hello.session for member, link in trainers.items()}
        held = self._placement
        return held if held is not None and held.sessions == sessions else None

    def require(self, trainers: Mapping[str, RankHandle[TrainerRank]]) -> Placement:
        """Return :meth:`current`.

        Raises:
            StaleSource: Nothing can be read.
        """
        placement = self.current(trainers)
        if not trainers:
            raise StaleSource("no trainer is connected, so no replica can be updated now; the next publication updates them")
        if placement is None:
            raise StaleSource(
                "no version can be read from the trainer now, so no replica can be updated; the next publication updates them "
                "(GPU memory that is published in place can be read only until publish returns)"
            )
        return placement


class Epochs:
    """Grants one new epoch to each set of trainer processes that asks for one.

    Grants survive a restart of either side: this object remembers them by process, and trainer ranks report theirs
    (``Hello.epoch``). While only engine ranks know a version, grants do not bind: the trainer follows what the engines report,
    unless it is a relay with a signed version of a later epoch.
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
            epoch = current + (bool(asking) and self._publications.highest_in(current) >= 0)
        if epoch > _LAST_EPOCH:
            raise VersionError(f"epoch {current} is the last one: no new epoch can begin. Start another run (WEIGHTSYNC_RUN)")
        self._granted = {rank.hello.session: epoch for rank in ranks}
        return epoch

    def _granted_to(self, rank: TrainerRank) -> int | None:
        signed = rank.hello.version  # a relay's: no trainer rank knows a version where only an engine does
        if self._publications.witness and (signed is None or signed.epoch <= self._publications.epoch):
            return None  # nothing was published in any grant, and the next epoch may be a false claim
        return self._granted.get(rank.hello.session) or rank.hello.epoch or None
