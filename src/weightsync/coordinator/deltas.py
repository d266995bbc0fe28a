"""A round that moves only the words that changed: staged while a replica serves, and undone if the round fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightsync import failpoints
from weightsync.coordinator.negotiation import TransferPlan
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.rank_handle import RoundDeadline, in_thread, on_all
from weightsync.coordinator.ranks import check_digests
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.round_context import Engines
from weightsync.errors import DeadlineExceeded, ProtocolError, WeightSyncError
from weightsync.model import Version
from weightsync.protocol.messages import Done, Resume, Revert, Stage, Staged

_log = logging.getLogger(__name__)
_MOST_BASES = 8  # that a trainer rank is asked for


@dataclass(frozen=True, eq=False)
class StagedDelta:
    """What changed since ``base`` is at every rank of a replica, which still serves ``base``: so many bytes, by member."""

    base: Version
    nbytes: Mapping[str, int]


def served_bases(replicas: Iterable[Replica], epoch: int) -> tuple[int, ...]:
    """Numbers of the versions of this ``epoch`` that replicas serve: the newest of them."""
    served = {replica.version.number for replica in replicas if replica.version is not None and replica.version.epoch == epoch}
    return tuple(sorted(served, reverse=True)[:_MOST_BASES])


async def stage(
    replica: Replica, engines: Engines, agreed: TransferPlan, placement: Placement, deadline: RoundDeadline
) -> StagedDelta | None:
    """Let every rank fetch what changed since the version that it serves, and say what its digests will be.

    They must add up to those of the new version, before anything is paused.

    Returns:
        ``None`` if all bytes must move, as the log says: the replica serves another version, a rank does not know what it
        installed, the changes are too many for its staging memory, or they do not lead to the new version.

    Raises:
        DeadlineExceeded: A rank did not answer in time. It was not paused.
    """
    delta = next((delta for delta in placement.deltas if delta.base == replica.version), None)
    if delta is None or replica.state != "loaded" or agreed.delivery != "direct":
        return None
    try:
        asked = {}
        for member in engines:
            sources = [source.member for source in agreed.slices[member].sources]
            asked[member] = Stage(placement.version.number, delta.base, tuple(delta.changed[source] for source in sources))
        staged = await _each(engines, asked, deadline)
        for member, answer in staged.items():
            check_digests(member, answer.digests, agreed.slices[member].layout.rows, "rows")
            if answer.nbytes < 0:
                raise ProtocolError(f"{member} staged {answer.nbytes} bytes")
        await in_thread("verifying what is staged", deadline, lambda: agreed.check(staged, placement.digests))
    except DeadlineExceeded:
        raise
    except WeightSyncError as error:
        _log.info("replica %s gets all bytes of version %s, not its changes: %s", replica.name, placement.version, error)
        return None
    failpoints.reached("round.staged")
    return StagedDelta(delta.base, {member: answer.nbytes for member, answer in staged.items()})


async def _each(engines: Engines, asked: Mapping[str, Stage], deadline: RoundDeadline) -> dict[str, Staged]:
    """Ask every rank, and wait for all: a call that is withdrawn ends the connections by which the rank then reads all bytes."""
    calls = (on_all("stage", deadline, {member: link}, asked[member], Staged) for member, link in engines.items())
    answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, DeadlineExceeded)):
        raise error
    return {member: staged for answer in answers if not isinstance(answer, BaseException) for member, staged in answer.items()}


async def reverted(replica: Replica, engines: Engines, base: Version, seconds: float) -> bool:
    """Put the words of ``base`` back at every rank, and let all generate with it again, within ``seconds``.

    Returns:
        Whether the replica serves ``base``. If not, it must be quarantined.
    """
    deadline = RoundDeadline(seconds)
    try:
        await on_all("revert", deadline, engines, Revert(base), Done)
        failpoints.reached("round.reverted")
        await on_all("resume", deadline, engines, Resume(), Done)
        for link in engines.values():
            link.prepared = None  # as after every failure: a rank may have dropped its connections
        replica.succeed(dict(engines), base)
    except WeightSyncError as error:
        _log.warning("replica %s could not go back to version %s: %s", replica.name, base, error)
        return False
    return True
