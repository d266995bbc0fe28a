"""One attempt to bring replicas to a version: the protocol, as one function over ranks.

::

    agree ──┐                        ┌─ replica 0: pause ─ move ─ verify ─ commit ─ resume
            ├── a version exists ────┼─ replica 1: pause ─ move ✗ quarantine
    place ──┘                        └─ replica 2: ...

Trainer ranks place their shards while engines still serve and prepare. Then each replica goes its own way: whatever happens to
one, the others neither wait for it nor fail with it. A replica whose ranks do not agree was not paused, and goes on serving
what it has. A replica that fails later is quarantined: paused, without a label, until a later round succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightsync import failpoints
from weightsync.config import RoundSettings
from weightsync.coordinator.events import RoundStarted, Watcher
from weightsync.coordinator.negotiation import Agreement
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Placement, Shelves
from weightsync.coordinator.rank_handle import Limit, Link, bounded, in_thread, on_all
from weightsync.coordinator.ranks import EngineNode, TrainerNode
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import Report, round_result
from weightsync.errors import ConfigurationError, PeerLost, PlanMismatch, ProtocolError, VerificationError, WeightSyncError
from weightsync.model import Version, fold
from weightsync.protocol.messages import Moved, PlanSlice, ReplicaResult, RoundResult

__all__ = ["Order", "prepare", "run_round"]

Trainers = Mapping[str, Link[TrainerNode]]
Engines = Mapping[str, Link[EngineNode]]

_log = logging.getLogger(__name__)
_ROWS_AT_ONCE = 1 << 17  # so many digests are compared (1 ms at most) sooner than a thread is asked to


@dataclass(frozen=True, eq=False)
class Order:
    """What a round is to do, and with whom. The coordinator fills it in."""

    round: int
    number: int
    """The version to publish; for seeding, the one on the shelves."""
    epoch: int
    """What the number belongs to."""
    seeding: bool
    """Re-seed from what the shelves hold, without placing."""
    trainers: Trainers
    replicas: Sequence[Replica]
    shelves: Shelves
    settings: RoundSettings
    limit: Limit
    grace: float
    """Seconds that a quarantine may take, even after ``limit``; at most the settings' own."""
    emit: Watcher
    left_out: Sequence[ReplicaResult] = ()
    """Replicas that cannot take part, and that the result lists and counts all the same."""
    planner: Planner = field(default_factory=Planner)
    serving: asyncio.Semaphore = field(init=False)
    """One place for each replica that may be out of service at a time."""

    def __post_init__(self) -> None:
        """As many places as the settings allow; without a limit, as many as there are replicas."""
        places = self.settings.max_unavailable or max(len(self.replicas), 1)
        object.__setattr__(self, "serving", asyncio.Semaphore(places))


async def run_round(order: Order) -> RoundResult:
    """Bring every replica of ``order`` to the version, each independently; a result for each.

    Ends at most ``order.grace`` after ``order.limit``. Raises the trainer's error if no version came into being: then no
    replica was paused. When cancelled, replicas in the middle are quarantined before this ends.
    """
    started = asyncio.get_running_loop().time()
    failpoints.reached("round.start")
    names = tuple(replica.name for replica in order.replicas)
    order.emit(RoundStarted(order.round, order.number, names, order.seeding, order.epoch))
    reports = [Report(replica, order.round, order.emit) for replica in order.replicas]
    try:
        async with asyncio.TaskGroup() as group:
            placing = group.create_task(place(order))
            ended = [group.create_task(_bring(order, report, placing)) for report in reports]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
    finally:
        del reports  # what failed refers to this frame: plans must not wait for a collection
    placement, place_seconds = placing.result()
    failpoints.reached("round.end")
    seconds = asyncio.get_running_loop().time() - started
    results = [*(task.result() for task in ended), *order.left_out]
    return round_result(order.round, placement.version, order.settings.require, results, place_seconds, seconds)


async def _bring(order: Order, report: Report, placing: asyncio.Task[tuple[Placement, float]]) -> ReplicaResult:
    """One replica through the whole round. Never raises, but for cancellation: what goes wrong is this replica's result."""
    replica, limit = report.replica, order.limit
    engines = replica.members()
    try:
        with report.phase("agree"):
            agreed = report.agreement = await agree(order, replica, engines)
        failpoints.reached("round.agreed")
        placement, _ = placing.result() if placing.done() else await bounded("placing", limit, asyncio.shield(placing))
        failpoints.reached("round.placed")
        if order.seeding:  # a replica that serves is not paused for a version that is not there any more
            number = placement.version.number
            await on_all("check", limit, engines, lambda link, left: link.node.check_sources(number, left))
        bring = _at_once if len(engines) == 1 else _step_by_step
        async with _turn(order, report), _out_of_service(order, report, engines) as serves:
            await bring(order, report, engines, agreed, placement)
            serves(placement.version)
    except WeightSyncError as error:
        report.failed(error)
    except Exception as error:  # noqa: BLE001 - reported as this replica's result: a bug met here must not fail the others
        _log.exception("round %d failed in replica %s by an unexpected error", order.round, replica.name)
        report.failed(error)
    return report.result()


@asynccontextmanager
async def _turn(order: Order, report: Report) -> AsyncIterator[None]:
    """Wait until fewer than ``max_unavailable`` replicas are out of service. A replica that serves nothing now does not wait."""
    if report.replica.state != "loaded":
        yield
        return
    if order.serving.locked():
        with report.phase("wait"):
            await bounded("waiting for its turn", order.limit, order.serving.acquire())
    else:
        await order.serving.acquire()
    try:
        yield
    finally:
        order.serving.release()


async def place(order: Order) -> tuple[Placement, float]:
    """Let the trainer ranks place a new version on their shelves, or take the one that is there (seeding); and the seconds.

    The version exists from here on: its digest is the sum of what every rank saw in its own memory while it copied.
    """
    if order.seeding:
        return order.shelves.require(order.trainers), 0.0
    started, limit = asyncio.get_running_loop().time(), order.limit
    ranks = {member: link.node.rank for member, link in order.trainers.items()}
    if not ranks:
        raise PeerLost("no trainer rank is connected any more: nothing can be published")
    manifest = next(iter(ranks.values())).manifest
    if not manifest.nbytes:
        raise ConfigurationError("the trainer's tensors hold no bytes: nothing can be published")
    cover = await order.planner.cover(manifest, ranks, limit)
    order.shelves.clear()
    digests = await on_all("place", limit, order.trainers, lambda link, left: link.node.place(order.number, left, order.epoch))
    for member, rows in digests.items():
        if rows.dtype != np.uint64 or rows.shape != (len(ranks[member].layout),):
            wanted = len(ranks[member].layout)
            raise ProtocolError(
                f"{member} sent digests of {rows.dtype}{list(rows.shape)}, not one uint64 for each of {wanted} rows"
            )
    totals = await in_thread("adding up the trainer's digests", limit, lambda: cover.total(digests))
    version = Version(order.settings.run, order.number, manifest.fingerprint, fold(totals), order.epoch)
    live = any(rank.live for rank in ranks.values())
    placement = Placement(version, totals, {member: rank.session for member, rank in ranks.items()}, live)
    order.shelves.hold(placement)
    return placement, asyncio.get_running_loop().time() - started


async def agree(order: Order, replica: Replica, engines: Engines) -> Agreement:
    """Same manifest, complete covers, one plan; and every rank has understood its part of it and is ready. Nothing is paused."""
    if replica.missing:
        absent = replica.missing_in_words
        raise WeightSyncError(f"replica {replica.name} is not complete: rank {absent} of {replica.world_size} is missing")
    await _settled(order, replica)
    if replica.preparing is not None:
        await asyncio.wait([replica.preparing], timeout=order.limit.remaining("preparing ahead of the round"))
    return await prepare(order.planner, order.trainers, replica, engines, order.limit)


async def prepare(planner: Planner, trainers: Trainers, replica: Replica, engines: Engines, limit: Limit) -> Agreement:
    """Plan for ``engines``, and let those that are not ready for that plan connect, map memory and build tables."""
    sources = {member: link.node.rank for member, link in trainers.items()}
    ranks = {member: link.node.rank for member, link in engines.items()}
    agreed = await planner.agree(replica.name, sources, ranks, limit)
    slices, key = agreed.slices, agreed.key
    unprepared = {member: link for member, link in engines.items() if link.prepared != key}
    for link in unprepared.values():
        link.prepared = None  # whatever becomes of this: a rank drops the plan that it has to prepare another
    answers = await on_all("prepare", limit, unprepared, lambda link, left: link.node.prepare(slices[link.member], left))
    for member, answer in answers.items():
        if answer.digest != slices[member].digest:
            wanted = slices[member].digest
            raise PlanMismatch(f"{member} understood plan {answer.digest}, not {wanted}: do both run the same weightsync?")
        engines[member].prepared, engines[member].transports = key, answer.transports
    return agreed


async def _settled(order: Order, replica: Replica) -> None:
    """Let a quarantine outside of any round end: it aborts whatever runs in the ranks, also what was ordered after it."""
    if replica.quarantining is not None:
        await asyncio.wait([replica.quarantining], timeout=order.limit.remaining("an earlier quarantine"))


class _Permit:
    """What :func:`_out_of_service` lends: called with the version that every rank has committed and generates with."""

    def __init__(self) -> None:
        self.version: Version | None = None

    def __call__(self, version: Version) -> None:
        self.version = version


@asynccontextmanager
async def _out_of_service(order: Order, report: Report, engines: Engines) -> AsyncIterator[_Permit]:
    """The replica gets no requests inside. Two ways out: every rank serves a new version, or quarantine of every rank.

    Whoever leaves without having called the permit, by an error, by cancellation or by mistake, leaves a dirty replica.
    """
    replica, links = report.replica, dict(engines)
    await _settled(order, replica)
    replica.begin(links)
    permit = _Permit()
    report.paused()
    try:
        yield permit
        if permit.version is None:
            raise WeightSyncError("a replica was taken out of service, and not updated")
        replica.succeed(links, permit.version)
        report.resumed()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        replica.fail(links, reason)
        report.enter("quarantine")
        await quarantine(engines, reason, order.grace)
        raise


async def _step_by_step(order: Order, report: Report, engines: Engines, agreed: Agreement, placement: Placement) -> None:
    """Each step in all ranks before the next in any: nobody moves while another generates, nor resumes before all committed."""
    version, limit = placement.version, order.limit
    with report.phase("pause"):
        await pause(engines, order)
    failpoints.reached("round.paused")
    with report.phase("move"):
        moved = report.moved = await move(engines, version.number, agreed, limit)
    failpoints.reached("round.moved")
    with report.phase("verify"):
        await verify(agreed, moved, placement, limit)
    failpoints.reached("round.verified")
    with report.phase("commit"):
        await commit(engines, version, limit)
        failpoints.reached("round.committed")
        await resume(engines, limit)
    failpoints.reached("round.resumed")


async def _at_once(order: Order, report: Report, engines: Engines, agreed: Agreement, placement: Placement) -> None:
    """The same steps of a rank that is a whole replica, in one exchange: it compares with the version's digest by itself.

    What it reports is compared here once more, tensor by tensor: to name those that differ, and so as not to believe it.
    """
    version, mode = placement.version, order.settings.pause_mode
    report.enter("pause")  # whoever sends requests to it shall know before it stands
    failpoints.reached("round.paused")
    with report.phase("move"):
        updated = await on_all("update", order.limit, engines, lambda link, left: link.node.update(version, mode, left))
    failpoints.reached("round.moved")
    [(member, answer)] = updated.items()
    report.moved = _whole(agreed, {member: answer.moved})
    with report.phase("verify"):
        await verify(agreed, report.moved, placement, order.limit)
    failpoints.reached("round.verified")
    if not answer.committed:
        raise VerificationError(f"{member} did not commit what it says that it installed")
    report.enter("commit")
    report.moved_with({"pause": answer.pause_seconds, "commit": answer.commit_seconds})


async def pause(engines: Engines, order: Order) -> None:
    """Every rank stops generating."""
    await on_all("pause", order.limit, engines, lambda link, left: link.node.pause(order.settings.pause_mode, left))


async def move(engines: Engines, number: int, agreed: Agreement, limit: Limit) -> dict[str, Moved]:
    """Every rank fetches its bytes and reads back what it installed. A part, or nothing, is an error."""
    return _whole(agreed, await on_all("move", limit, engines, lambda link, left: link.node.move(number, left)))


def _whole(agreed: Agreement, moved: dict[str, Moved]) -> dict[str, Moved]:
    for member, answer in moved.items():
        wanted: PlanSlice = agreed.slices[member]
        if answer.nbytes != wanted.nbytes:
            raise VerificationError(f"{member} moved {answer.nbytes:,} bytes, not the plan's {wanted.nbytes:,}")
        if len(answer.digests) != 8 * wanted.layout.rows:
            rows = wanted.layout.rows
            raise ProtocolError(f"{member} sent {len(answer.digests)} bytes of digests, not 8 for each of {rows} rows")
    return moved


async def verify(agreed: Agreement, moved: Mapping[str, Moved], placement: Placement, limit: Limit) -> None:
    """What is installed adds up to what was placed. Raises :class:`~weightsync.errors.VerificationError` naming tensors."""
    digests: dict[str, npt.NDArray[np.uint64]] = {
        member: np.frombuffer(answer.digests, "<u8").astype(np.uint64, copy=False) for member, answer in moved.items()
    }

    def check() -> None:
        for members, cover in agreed.covers:
            cover.check({member: digests[member] for member in members}, placement.digests)

    if sum(map(len, digests.values())) > _ROWS_AT_ONCE:
        await in_thread("verifying", limit, check)
    else:
        check()


async def commit(engines: Engines, version: Version, limit: Limit) -> None:
    """Every rank finishes, flushes its caches and takes the label."""
    await on_all("commit", limit, engines, lambda link, left: link.node.commit(version, left))


async def resume(engines: Engines, limit: Limit) -> None:
    """Every rank generates again."""
    await on_all("resume", limit, engines, lambda link, left: link.node.resume(left))


async def quarantine(engines: Engines, reason: str, grace: float) -> None:
    """Every rank that can still be reached stays paused, whatever it was doing. Not cancellable; ends within ``grace`` seconds.

    A rank that does not answer cannot be helped: it was not resumed either, and its replica gets no requests.
    """

    async def one(link: Link[EngineNode]) -> None:
        try:
            await on_all("quarantine", Limit(grace), {link.member: link}, lambda link, left: link.node.quarantine(reason, left))
        except WeightSyncError as error:
            _log.warning("could not quarantine %s: %s", link.member, error)

    work = asyncio.gather(*(one(link) for link in engines.values()))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
