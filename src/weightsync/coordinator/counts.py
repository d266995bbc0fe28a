"""What the processes of a trainer's ranks have counted: calls of ``publish()`` with equal counts belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import TrainerRank
from weightsync.protocol.messages import Publish

_MOST_CLAIMED_COUNT = 1 << 47


@dataclass
class Counted:
    """What the process of a trainer rank has counted."""

    session: str
    start: int
    """The publication after which it started."""
    count: int
    """The last one that it began."""
    took_part: bool
    """Whether a round of it has begun."""
    elsewhere: bool
    """Whether it placed versions for an earlier coordinator, which may have had them served."""
    guessed: bool
    """Whether it started when no connected rank knew the run's count."""

    @property
    def adrift(self) -> bool:
        """Whether its count is still a guess."""
        return self.guessed and not self.took_part


class PublishCounts(dict[str, Counted]):
    """The counts of one trainer's ranks, by member."""

    def joined(self, link: RankHandle[TrainerRank], members: Collection[str], waiting: Mapping[str, Publish]) -> None:
        """Tell a new process of a trainer rank, by ``link.count``, after which publication it starts.

        It starts with other processes that have just started, if there are any. If it starts alone, it joins the others in the
        publication in which they are ``waiting``, or in their next one.
        """
        hello, mine = link.rank.hello, self.get(link.member)
        if mine is None or mine.session != hello.session:
            present = {*members, *waiting} - {link.member}
            others = {member: self[member] for member in present if member in self}
            counting = {member for member, asked in waiting.items() if asked.step is None}
            # An earlier process of this rank may have begun calls since they started: then they have gone on without it.
            since = 0 if mine is None or mine.took_part else mine.count
            new = [other for other in others.values() if not other.took_part and other.start >= since]
            starts = [other.start for other in new] or [other.count - (member in counting) for member, other in others.items()]
            guessed = not hello.count and (not others or any(other.guessed for other in new))
            if hello.count:  # of an earlier coordinator; without an epoch it took part in nothing, and others may start with it
                start = hello.count if hello.epoch else min(hello.start, hello.count)
            else:
                start = min(max(starts, default=0), _MOST_CLAIMED_COUNT)
            begun = max(hello.count, start)
            mine = self[link.member] = Counted(hello.session, start, begun, hello.epoch > 0, hello.epoch > 0, guessed)
        link.count = mine.start
