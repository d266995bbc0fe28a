"""Run one round: the protocol that brings replicas to a version.

::

    agree ──┐                        ┌─ replica 0: pause ─ move ─ verify ─ commit ─ resume
            ├── a version exists ────┼─ replica 1: pause ─ move ✗ quarantine
    place ──┘                        └─ replica 2: ...

Trainer ranks place their shards in their published regions while engines prepare and still serve. Each replica then proceeds
independently: it neither waits for another replica nor fails with it. A replica whose ranks fail to agree was not paused and
keeps serving its version. A replica that fails later is quarantined: it stays paused, without a version label, until a later
round succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from weightsync import failpoints
from weightsync.arrays import UInt64
from weightsync.coordinator.agreement import StagedDelta, keep_layouts, prepare, reverted, served_bases, stage, wait_for_background
from weightsync.coordinator.events import RoundStarted, Watcher
from weightsync.coordinator.keyed_digests import KeyedDigests
from weightsync.coordinator.negotiation import TransferPlan
from weightsync.coordinator.publications import Placement
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, bounded, in_thread, on_all, ranks_of
from weightsync.coordinator.ranks import EngineRank, check_digests, unpacked
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import Report, round_result
from weightsync.coordinator.round_context import Engines, Placing, RoundContext, Source
from weightsync.errors import ConfigurationError, DeadlineExceeded, PeerLost, StaleSource, VerificationError, WeightSyncError
from weightsync.model import Version, fold
from weightsync.protocol.messages import (
    CheckSources,
    Commit,
    Done,
    Move,
    Moved,
    Pause,
    Place,
    Placed,
    Quarantine,
    ReplicaResult,
    Resume,
    RoundResult,
    Update,
    Updated,
)
from weightsync.spans import span

R = TypeVar("R", bound=Report)

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 1 << 17  # comparing up to this many digests (1 ms at most) is faster than handing them to a thread


async def run_round(context: RoundContext) -> RoundResult:
    """Bring every replica of ``context`` to the version, each independently.

    Returns:
        The result of the round, with one result for each replica. Failed replicas are results, not errors.

    Raises:
        WeightSyncError: Placing failed, so no version exists and no replica was paused.
    """
    return await conduct(context, place, _update_replica, Report)


async def conduct(
    context: RoundContext,
    place: Callable[[RoundContext], Coroutine[Any, Any, tuple[Placement, float]]],
    update: Callable[[RoundContext, R, Placing], Coroutine[Any, Any, None]],
    report_of: Callable[[Replica, int, Watcher], R],
) -> RoundResult:
    """Run a round: ``place`` the version, and meanwhile ``update`` every replica to it.

    The round ends at most ``context.grace`` seconds after ``context.deadline``. If it is cancelled, or placing fails, it first
    quarantines the replicas that are in the middle of an update. An error of ``update`` becomes the result of that replica alone.
    """
    started = asyncio.get_running_loop().time()
    failpoints.reached("round.start")
    names = tuple(replica.name for replica in context.replicas)
    context.emit(RoundStarted(context.round, context.number, names, context.seeding, context.epoch))
    reports = [report_of(replica, context.round, context.emit) for replica in context.replicas]

    async def updated(report: R) -> ReplicaResult:
        try:
            await update(context, report, placing)
        except WeightSyncError as error:
            report.failed(error)
        except Exception as error:  # noqa: BLE001 - becomes this replica's result: a bug here must not fail other replicas
            _log.exception("round %d failed in replica %s: unexpected error", context.round, report.replica.name)
            report.failed(error)
        return report.result(context.publications)

    try:
        async with asyncio.TaskGroup() as group:
            placing = group.create_task(place(context))
            ended = [group.create_task(updated(report)) for report in reports]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
    finally:
        del reports  # the exception refers to this frame, and plans must be freed without a garbage collection
    placement, place_seconds = placing.result()
    failpoints.reached("round.end")
    seconds = asyncio.get_running_loop().time() - started
    results = [*(task.result() for task in ended), *context.absent()]
    share = placement.deltas[0].share if placement.deltas else None
    return round_result(
        context.round, placement.version, context.settings.require, results, place_seconds, seconds, context.step, share
    )


async def _update_replica(context: RoundContext, report: Report, placing: Placing) -> None:
    """Update one replica from the nearest source, and from another one if that fails."""
    replica, sources = report.replica, context.sources
    failed, updated = None, False
    refuted: Replica | None = None
    while not updated:
        async with sources.lease(report, context.deadline, failed) as source:
            if source.replica is not None and await _placed_at(context, source) is None:
                continue
            report.source = replica.fed_by = source.name
            final = failed is not None or not sources.alternative(source, replica)
            try:
                await _update_from(context, report, placing, source, final)
                updated = True
            except WeightSyncError as error:
                if isinstance(error, VerificationError):
                    refuted = _blame(replica, source.replica, refuted)
                if final or not context.deadline.left:
                    raise
                failed = source
                _log.warning("replica %s could not be updated from replica %s: %s", replica.name, source.name, error)
    sources.add(replica)


def _blame(reader: Replica, source: Replica | None, earlier: Replica | None) -> Replica | None:
    """Record that ``reader`` held other bytes than the version's after it read them from ``source``; ``None`` is the trainer.

    Nobody reads from such a replica until it has verified a version again. But if the reader has failed in the same way after it
    read from an ``earlier`` source of this round, the fault is the reader's, and neither source is blamed.

    Returns:
        The replica that is blamed.
    """
    if earlier is not None:
        earlier.refuted_by.discard(reader.name)
    elif source is not None:
        source.refuted_by.add(reader.name)
        return source
    return None


def _half(deadline: RoundDeadline) -> RoundDeadline:
    """Half of the time that is left: a replica that hangs must leave enough to read from another source."""
    return RoundDeadline(deadline.remaining("reading from a replica") / 2)


async def _update_from(context: RoundContext, report: Report, placing: Placing, source: Source, final: bool) -> None:
    """Update one replica from ``source``, in half of the time that is left if the attempt is not the ``final`` one."""
    replica, engines = report.replica, report.replica.members()

    def attempt_deadline() -> RoundDeadline:
        return context.deadline if final else _half(context.deadline)

    with report.phase("agree"):
        agreed = report.agreement = await agree(context, replica, engines, source, attempt_deadline())
    failpoints.reached("round.agreed")
    placement, _ = placing.result() if placing.done() else await bounded("placing", context.deadline, asyncio.shield(placing))
    failpoints.reached("round.placed")
    if context.seeding:  # do not pause a serving replica for a version that is gone
        await on_all("check", attempt_deadline(), engines, CheckSources(placement.version.number), Done)
    # What another replica serves is believed under a key only. Until the digests are there, this one serves on.
    keyed = None if source.replica is None else await context.keyed.draw(placement.version, attempt_deadline(), replica.name)
    staged = None
    if source.replica is None and placement.deltas:
        with report.phase("stage"):  # in half of the time: the other half must suffice for all bytes
            staged = await stage(replica, engines, agreed, placement, _half(attempt_deadline()))
    async with _availability(context, report), out_of_service(context, report, engines) as serves:
        report.base = None if staged is None else staged.base
        serves.reverts_to = report.base if staged is not None and staged.reversible else None
        if len(engines) == 1 and keyed is None:
            await _at_once(context, report, serves, engines, agreed, placement, staged, attempt_deadline())
        else:
            await _step_by_step(context, report, serves, engines, agreed, placement, keyed, staged, attempt_deadline())
        serves(placement.version)


async def _placed_at(context: RoundContext, source: Source) -> UInt64 | None:
    """Let the ranks of a replica make the version that it serves readable, once for all readers of a round.

    Returns:
        The digest of each tensor, ``uint64[tensors]``, of what can be read there now; ``None`` if nothing can.
    """
    version = source.version
    await bounded(f"another reader of replica {source.name}", context.deadline, source.placing.acquire())
    try:
        if source.digests is None and not source.failed and source.serves and source.replica is not None and version is not None:
            limit, (epoch, number) = _half(context.deadline), version.order
            rows = _rows(await on_all("place", limit, source.links, Place(number, epoch), Placed))
            cover = await context.planner.cover(source.replica.manifest, source.ranks, limit, source.name)
            digests = await in_thread("adding up a replica's digests", limit, lambda: cover.total(rows))
            if fold(digests) != version.digest:
                raise VerificationError(f"replica {source.name} does not hold the bytes of version {version}")
            source.digests = digests
    except WeightSyncError as error:
        if isinstance(error, VerificationError) and source.serves and source.replica is not None:
            context.exclude(source.replica, str(error))
            _log.error("replica %s is taken out of service: %s", source.name, error)
        else:
            if isinstance(error, StaleSource) and source.serves and source.replica is not None:
                source.replica.refuted_by.add(source.name)  # it says so itself; the store may have a version
            _log.warning("other replicas cannot read from replica %s: %s", source.name, error)
    finally:
        source.placing.release()
    if source.digests is None or not source.serves:
        source.failed = True
        return None
    return source.digests


@asynccontextmanager
async def _availability(context: RoundContext, report: Report) -> AsyncIterator[None]:
    """Wait until fewer than ``max_unavailable`` replicas are out of service, then drain. Who serves nothing does not wait.

    A replica counts until routers know it again: otherwise, with two of them, there would be a moment without any.
    If one has waited and less time is left than its last update took, it serves on. After that it is not held back again. An
    update that took more than half of a round's time does not count: something had failed in it.
    """
    if report.replica.state != "loaded":
        yield
        return
    with report.phase("wait") if context.serving.locked() else nullcontext():
        await bounded("waiting for its turn", context.deadline, context.serving.acquire())
    try:
        usual = min(report.replica.paused_seconds or 0.0, context.deadline.seconds / 2)
        needed, left = context.settings.drain + usual, context.deadline.left
        if "wait" in report.phases and left < needed:
            raise DeadlineExceeded(f"its turn came {left:.3g} s before the deadline, and it expects to take {needed:.3g} s")
        async with drained(context, report):
            yield
        if context.settings.max_unavailable is not None:
            await context.announced()
    finally:
        context.serving.release()


@asynccontextmanager
async def drained(context: RoundContext, report: Report) -> AsyncIterator[None]:
    """Take a replica that serves from routers, and give them the settings' time to stop sending requests, before the block."""
    replica, seconds = report.replica, context.settings.drain
    try:
        if seconds and replica.state == "loaded":
            replica.draining = True
            with report.phase("drain"):
                await bounded("draining", context.deadline, asyncio.sleep(seconds))
        yield
    finally:
        replica.draining = False


async def place(context: RoundContext) -> tuple[Placement, float]:
    """Let the trainer ranks place a new version in their regions; for seeding, take the version that is there.

    The version exists once every rank has placed: its digest is the sum of the digests that the ranks computed while they copied.

    Returns:
        The placement, and the seconds that it took.

    Raises:
        PeerLost: No trainer rank is connected.
        ConfigurationError: The trainer's tensors hold no bytes.
        ProtocolError: A rank sent digests of the wrong shape or dtype.
        StaleSource: For seeding, no version can be read from the trainer.
    """
    started, limit = asyncio.get_running_loop().time(), context.deadline
    if context.seeding:
        if context.stored is not None:
            return Placement(context.stored.version, context.stored.digests, {}), 0.0
        if context.sources.trainer is None and context.readable:
            return await _placement_of_replica(context), asyncio.get_running_loop().time() - started
        return context.publications.require(context.trainers), 0.0
    ranks = ranks_of(context.trainers)
    if not ranks:
        raise PeerLost("no trainer rank is connected any more: nothing can be published")
    manifest = next(iter(ranks.values())).manifest
    if not manifest.nbytes:
        raise ConfigurationError("the trainer's tensors hold no bytes: nothing can be published")
    cover = await context.planner.cover(manifest, ranks, limit)
    context.publications.clear()
    bases = served_bases(context.replicas, context.epoch)
    order = context.publications.next_order()
    asked = {member: Place(context.number, context.epoch, context.calls.get(member, 0), bases, order) for member in ranks}
    placed = await on_all("place", limit, context.trainers, asked, Placed)
    digests = _rows(placed)
    with span("sum"):
        totals = await in_thread("adding up the trainer's digests", limit, lambda: cover.total(digests))
    version = Version(context.settings.run, context.number, manifest.fingerprint, fold(totals), context.epoch)
    live = any(rank.hello.live for rank in ranks.values())
    sessions = {member: rank.hello.session for member, rank in ranks.items()}
    placement = Placement(version, totals, sessions, live, context.publications.deltas(placed))
    context.publications.hold(placement)
    return placement, asyncio.get_running_loop().time() - started


def _rows(placed: Mapping[str, Placed]) -> dict[str, UInt64]:
    return {member: unpacked(answer.digests) for member, answer in placed.items()}


async def _placement_of_replica(context: RoundContext) -> Placement:
    """The version that replicas serve to others, from the first of them that makes it readable.

    Raises:
        StaleSource: None does.
    """
    for source in context.sources.nearest(context.replicas[0]) if context.replicas else ():
        digests = await _placed_at(context, source)
        if digests is not None and source.version is not None:
            return Placement(source.version, digests, {}, live=True)
    raise StaleSource("no replica serves this version to others any more; the next publication updates this one")


async def agree(context: RoundContext, replica: Replica, engines: Engines, source: Source, deadline: RoundDeadline) -> TransferPlan:
    """Negotiate a plan for one replica and prepare its ranks for it, while the replica still serves.

    Afterwards source and replica hold the same manifest, their layouts cover it, and every engine rank is ready for its slice of
    the plan.

    Raises:
        WeightSyncError: The replica is incomplete, or its ranks cannot agree with the source's.
    """
    replica.require_complete()
    await wait_for_background(replica, deadline)
    await keep_layouts(engines, context.deadline)  # until the round ends: each later step has its own deadline
    return await prepare(context.planner, source.ranks, replica, engines, deadline)


class _Permit:
    """Yielded by :func:`out_of_service`. Call it with the version that every rank has committed and serves."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.reverts_to: Version | None = None
        """The version whose words can be put back. None once a rank may have finished loading."""

    def __call__(self, version: Version) -> None:
        self.version = version


@asynccontextmanager
async def out_of_service(context: RoundContext, report: Report, engines: Engines) -> AsyncIterator[_Permit]:
    """Take the replica out of service for the duration of the block.

    The block ends in one of two ways: every rank serves a new version and the caller has called the permit, or every rank is
    quarantined. Leaving the block without a call of the permit, be it by an error, by cancellation or by mistake, makes the replica
    dirty; unless only staged changes were applied, and every rank has put the words of the version before back. A receiver
    is out of service at once, without a wait: it serves nothing, and every failure must reach it.
    """
    replica, links = report.replica, dict(engines)
    if not replica.takes_any:
        await wait_for_background(replica, context.deadline)
    replica.begin(links)
    permit = _Permit()
    report.paused()
    try:
        yield permit
        if permit.version is None:
            raise WeightSyncError(f"replica {replica.name} was taken out of service but not updated")
        replica.succeed(links, permit.version)
        report.resumed()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        base, grace, serves = permit.reverts_to, context.grace, False
        try:
            if base is not None and isinstance(error, WeightSyncError):
                report.enter("revert")
                grace /= 2  # for each: the round must not end later than without
                serves = await reverted(replica, engines, base, grace)
        finally:  # also if the round is cancelled while its ranks revert
            if not serves:
                replica.fail(links, reason)
                report.enter("quarantine")
                await quarantine(engines, reason, grace)
        if serves:
            _log.warning("replica %s serves version %s on: %s", replica.name, base, reason)
        raise


async def _step_by_step(
    context: RoundContext,
    report: Report,
    permit: _Permit,
    engines: Engines,
    agreed: TransferPlan,
    placement: Placement,
    keyed: KeyedDigests | None,
    staged: StagedDelta | None,
    limit: RoundDeadline,
) -> None:
    """Run each step in all ranks before the next step in any rank.

    So no rank moves weights while another generates, and none resumes before all have committed. With ``keyed``, all digests are
    taken under its key. What is ``staged`` is applied; a rank whose parameters have moved since then moves all of its bytes.
    """
    version, key, expected = placement.version, b"", placement.digests
    if keyed is not None:
        key, expected = keyed.key, keyed.digests
    await pause(context, report, engines, limit)
    with report.phase("move"):
        moved = report.moved = await move(engines, version.number, agreed, limit, key, staged)
    failpoints.reached("round.moved")
    with report.phase("verify"):
        await verify(agreed, moved, expected, limit)
    failpoints.reached("round.verified")
    permit.reverts_to = None
    await finish(report, engines, version, limit)


async def _at_once(
    context: RoundContext, report: Report, permit: _Permit, engines: Engines, agreed: TransferPlan, placement: Placement,
    staged: StagedDelta | None, limit: RoundDeadline,
) -> None:  # fmt: skip
    """Run all steps in one exchange, for a replica of a single rank. The rank compares the digests with the version's itself.

    The coordinator checks the reported digests again, tensor by tensor, so that it can name tensors that differ and need not trust
    the rank. Words of what was ``staged`` are put back unless the rank had begun to commit: then it refuses that.
    """
    report.enter("pause")  # routers must know before the engine pauses
    failpoints.reached("round.paused")
    message = Update(placement.version, context.pause_mode, staged=staged is not None)
    with report.phase("move"):
        updated = await on_all("update", limit, engines, message, Updated)
    failpoints.reached("round.moved")
    [(member, answer)] = updated.items()
    if answer.committed:
        permit.reverts_to = None
    report.moved = whole(agreed, {member: answer.moved}, {} if staged is None else staged.nbytes)
    with report.phase("verify"):
        await verify(agreed, report.moved, placement.digests, limit)
    failpoints.reached("round.verified")
    if not answer.committed:
        raise VerificationError(f"{member} reported that it installed the weights but did not commit them")
    report.enter("commit")
    report.moved_with({"pause": answer.pause_seconds, "commit": answer.commit_seconds})


async def pause(context: RoundContext, report: Report, engines: Engines, deadline: RoundDeadline) -> None:
    """Stop generation in every rank."""
    with report.phase("pause"):
        await on_all("pause", deadline, engines, Pause(context.pause_mode, context.number, context.epoch), Done)
    failpoints.reached("round.paused")


async def move(
    engines: Engines,
    number: int,
    agreed: TransferPlan,
    deadline: RoundDeadline,
    key: bytes = b"",
    staged: StagedDelta | None = None,
) -> dict[str, Moved]:
    """Let every rank fetch its bytes and read back what it installed, with digests under ``key`` if it is not empty.

    Raises:
        VerificationError: A rank moved fewer or more bytes than planned.
        ProtocolError: A rank sent digests of the wrong size.
    """
    message = Move(number, key, staged=staged is not None)
    return whole(agreed, await on_all("move", deadline, engines, message, Moved), {} if staged is None else staged.nbytes)


def whole(agreed: TransferPlan, moved: dict[str, Moved], staged: Mapping[str, int] | None = None) -> dict[str, Moved]:
    """Check that every rank moved what the plan says, or what is ``staged`` there, and return ``moved``.

    Raises as :func:`move` does.
    """
    for member, answer in moved.items():
        wanted = agreed.slices[member]
        if answer.nbytes != wanted.nbytes and answer.nbytes != (staged or {}).get(member):
            raise VerificationError(f"{member} moved {answer.nbytes:,} bytes instead of the planned {wanted.nbytes:,}")
        check_digests(member, answer.digests, wanted.layout.rows, "rows")
    return moved


async def verify(agreed: TransferPlan, moved: Mapping[str, Moved], expected: UInt64, deadline: RoundDeadline) -> None:
    """Check that the installed digests add up to the ``expected`` ones of the published version, ``uint64[tensors]``.

    Raises:
        VerificationError: They do not. The message names the tensors.
    """
    if sum(len(answer.digests) for answer in moved.values()) > 8 * _ROWS_AT_ONCE:
        await in_thread("verifying", deadline, lambda: agreed.check(moved, expected))
    else:
        agreed.check(moved, expected)


async def finish(report: Report, engines: Engines, version: Version, deadline: RoundDeadline) -> None:
    """Commit ``version`` in every rank, then resume every rank."""
    with report.phase("commit"):
        await commit(engines, version, deadline)
        failpoints.reached("round.committed")
        await resume(engines, deadline)
    failpoints.reached("round.resumed")


async def commit(engines: Engines, version: Version, deadline: RoundDeadline) -> None:
    """Let every rank finish loading, flush its caches and take the version label."""
    await on_all("commit", deadline, engines, Commit(version), Done)


async def resume(engines: Engines, deadline: RoundDeadline) -> None:
    """Resume generation in every rank."""
    await on_all("resume", deadline, engines, Resume(), Done)


async def quarantine(engines: Engines, reason: str, grace: float) -> None:
    """Pause every rank that can still be reached, whatever it is doing. Not cancellable; ends within ``grace`` seconds.

    A rank that does not answer is only logged: it was not resumed either, and its replica receives no requests.
    """

    async def one(link: RankHandle[EngineRank]) -> None:
        try:
            await on_all("quarantine", RoundDeadline(grace), {link.member: link}, Quarantine(reason), Done)
        except WeightSyncError as error:
            _log.warning("could not take %s out of service: %s", link.member, error)

    work = asyncio.gather(*(one(link) for link in engines.values()))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
