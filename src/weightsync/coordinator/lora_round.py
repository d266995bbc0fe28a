"""Bring one version of a LoRA adapter to replicas, while all of them serve.

::

    replica 0: prepare ─┐              ┌─ stage ─ verify ─ register
    replica 1: prepare ─┴─ place once ─┼─ stage ✗ drop
    replica 2: prepare ✗

A replica stages one version at a time. If others wait for it while the trainer still places, they go first, and it prepares again.

A replica serves the version only after each of its ranks has staged and verified it. One that fails drops what it staged, serves
what it served before, and delays no other. If no replica can take the version, none is placed, so its number is not used up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import structs

from weightsync import failpoints
from weightsync.coordinator.negotiation import TransferPlan
from weightsync.coordinator.publications import Placement, Publications
from weightsync.coordinator.rank_handle import RoundDeadline, bounded, drop, on_all, ranks_of
from weightsync.coordinator.ranks import EngineRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import Report
from weightsync.coordinator.round import conduct, place, verify, whole
from weightsync.coordinator.round_context import Engines, Placing, RoundContext
from weightsync.errors import DeadlineExceeded, PeerLost, PlanMismatch, RoundFailed, VersionError
from weightsync.model import SERVICE, Version
from weightsync.model.lora import AdapterSpec, adapter_label
from weightsync.protocol.lora_messages import PrepareLora, RegisterLora, StageLora
from weightsync.protocol.messages import Done, Moved, Prepared, ReplicaResult, RoundResult

T = TypeVar("T")


class ReplicaTurn:
    """The right to use a replica's staging memory. Tenants get it one after the other, however many publications each has.

    A publication that takes long keeps it only while no other one waits: a tenant whose process stands still delays no other.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._wanted = asyncio.Event()

    @asynccontextmanager
    async def taken(self, tenant: str, deadline: RoundDeadline) -> AsyncIterator[None]:
        """Run the block in the turn. Raises :class:`~weightsync.errors.DeadlineExceeded` if it does not come in time."""
        if self._taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(mine)
            self._wanted.set()
            try:
                await bounded("another adapter's turn", deadline, mine)
            except BaseException:
                came = mine.done() and not mine.cancelled()  # in the moment in which the wait ended
                mine.cancel()
                self._look()
                if came:
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)  # behind the others
            self._pass_on()

    async def until_wanted(self, work: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for ``work``; after so many seconds only while no other publication waits. Returns whether it is done."""
        await asyncio.wait([work], timeout=seconds)
        if not work.done():
            wanted: asyncio.Future[Any] = asyncio.ensure_future(self._wanted.wait())
            try:
                await asyncio.wait([work, wanted], return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
        return work.done()

    async def bounded(self, what: str, seconds: float, work: Awaitable[T]) -> T:
        """Return the result of ``work``, which is cancelled as soon as it has taken so many seconds and another one waits.

        Raises:
            DeadlineExceeded: It was.
        """
        task = asyncio.ensure_future(work)
        try:
            if not await self.until_wanted(task, seconds):
                raise DeadlineExceeded(f"{what} did not finish within {seconds:.3g} s, and other adapters wait for the replica")
            return await task
        finally:
            task.cancel()

    def _pass_on(self) -> None:
        """Give the turn to the next tenant."""
        self._taken = False
        while self._waiting and not self._taken:
            tenant, waiting = next(iter(self._waiting.items()))
            first = waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
            if not first.done():
                first.set_result(None)
                self._taken = True
        self._look()

    def _look(self) -> None:
        if all(ended.done() for waiting in self._waiting.values() for ended in waiting):
            self._wanted.clear()


_PREPARE_SECONDS = 10.0  # for which a replica may take to connect
_PLACE_SECONDS, _STAGE_SECONDS, _STAGE_RATE = 1.0, 20.0, 64e6
"""For which it waits for the trainer, and takes to get the adapter, while others wait; and a second more for so many bytes."""
_ONE_BUCKET = 1 << 60
"""Larger than any adapter: an engine rank stages it in one piece."""


class _Delivery(Report):
    """Record of one replica, which serves what it served before, and shows nothing of this."""

    version: Version | None = None
    """The version, once it serves it."""
    transports: tuple[str, ...] = ()
    prepared: AdapterSpec
    """As its ranks were asked to prepare it, and report it when they reconnect."""
    agreed = False

    def result(self, publications: Publications) -> ReplicaResult:
        """Return the result of the replica."""
        state, verified = self.replica.shown_state, {answer.verified for answer in self.moved.values()}
        number, digest = (None, None) if self.version is None else (self.version.number, self.version.digest)
        return ReplicaResult(
            name=self.replica.name, state=state, version=number, digest=digest,
            nbytes=sum(answer.nbytes for answer in self.moved.values()), delivery="streamed", transports=self.transports,
            verified="" if self.version is None else "installed" if verified == {"installed"} else "received",
            delivery_reason=next(filter(None, (answer.reason for answer in self.moved.values())), ""),
            phases=self.phases, paused_seconds=0.0, error=self.error, source="trainer", service=SERVICE.get(state, state),
        )  # fmt: skip


@dataclass(eq=False)
class LoraRound:
    """One publication of ``spec`` to the replicas of ``context``; or, when seeding, of what the regions hold.

    ``turns`` has the turn of each replica, which stages one version at a time. ``registered`` gets each replica that
    serves the version. ``source`` names the trainer in plans, ``tenant`` whose publications it takes turns with.
    ``overwritten`` is called before the publisher's memory is overwritten with the version.
    """

    _context: RoundContext
    _spec: AdapterSpec
    _source: str
    _tenant: str
    _turns: Mapping[str, ReplicaTurn]
    _registered: Callable[[Replica, Version, AdapterSpec], None]
    _overwritten: Callable[[], None]
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a replica can take the version, or none can."""
    _refusals: list[str] = field(default_factory=list)

    async def run(self) -> RoundResult:
        """Run the round. Replicas that failed are results, not errors.

        Raises:
            RoundFailed: No replica can take the version.
            WeightSyncError: Placing failed.
        """
        return await conduct(self._context, self._place, self._deliver, _Delivery)

    async def _place(self, context: RoundContext) -> tuple[Placement, float]:
        replicas = context.replicas
        if replicas:
            await self._decided.wait()  # every delivery decides by the round's deadline
        if len(self._refusals) == len(replicas):
            label = adapter_label(self._spec.name, context.number)
            why = "; ".join(self._refusals) or "no engine that takes LoRA adapters is connected"
            raise RoundFailed(f"{label} was not published, and its number is free: {why}")
        if context.seeding:
            return await place(context)
        self._check_number(context.publications.last + 1)  # a replica may have joined with it since
        self._overwritten()
        placed = await place(context)
        self._check_number(context.publications.last)  # while it placed, another source may have published a later one
        return placed

    def _check_number(self, least: int) -> None:
        context = self._context
        if context.number < least:
            what = f"{adapter_label(self._spec.name, context.number)} cannot be published: the last one is"
            raise VersionError(f"{what} {context.publications.last}. publish() without a number takes the next one")

    async def _deliver(self, context: RoundContext, report: _Delivery, placing: Placing) -> None:
        """Bring the version to one replica."""
        try:
            await self._steps(report, placing)
        except Exception as error:
            if not report.agreed:
                report.failed(error)
                self._refusals.append(f"{report.replica.name}: {report.error}")
            raise
        finally:
            if report.agreed or len(self._refusals) == len(context.replicas):
                self._decided.set()

    async def _steps(self, report: _Delivery, placing: Placing) -> None:
        context, replica, engines = self._context, report.replica, report.replica.members()
        turn = self._turns[replica.name]
        with report.phase("agree"):
            agreed = await self._plan(replica, engines)
        try:
            while True:
                async with AsyncExitStack() as taken:
                    with report.phase("wait"):
                        await taken.enter_async_context(turn.taken(self._tenant, context.deadline))
                    with report.phase("agree"):
                        await self._prepare(report, agreed, engines)
                    report.agreed = True
                    self._decided.set()
                    failpoints.reached("round.lora.agreed")
                    if await turn.until_wanted(placing, _PLACE_SECONDS):
                        return await self._bring(report, turn, agreed, placing.result()[0], engines)
                with report.phase("wait"):  # its trainer may take long: others go first
                    await bounded("placing", context.deadline, asyncio.shield(placing))
        except BaseException:
            if report.agreed:
                await drop({**engines, **replica.members()}, self._spec.name, (context.number,), context.grace)
            raise

    async def _bring(
        self, report: _Delivery, turn: ReplicaTurn, agreed: TransferPlan, placement: Placement, engines: Engines
    ) -> None:
        spec, number, limit = self._spec, self._context.number, self._context.deadline
        with report.phase("move"):
            seconds = _STAGE_SECONDS + agreed.nbytes / _STAGE_RATE
            staging = on_all("stage", limit, engines, StageLora(spec.name, number), Moved)
            report.moved = whole(agreed, await turn.bounded("staging", seconds, staging))
        failpoints.reached("round.lora.staged")
        with report.phase("verify"):
            await verify(agreed, report.moved, placement.digests, limit)
        with report.phase("commit"):
            await on_all("register", limit, engines, RegisterLora(placement.version), Done)
            failpoints.reached("round.lora.registered")
            report.replica.require_links(engines)  # one that reconnected since it answered has reported again what it has
        report.version = placement.version
        self._registered(report.replica, placement.version, report.prepared)

    async def _plan(self, replica: Replica, engines: Engines) -> TransferPlan:
        self._check_base(replica)
        sources = ranks_of(self._context.trainers)
        if not sources:
            raise PeerLost("no rank that publishes the adapter is connected any more")
        manifest = next(iter(sources.values())).manifest
        staging = {
            member: EngineRank(
                structs.replace(link.rank.hello, delivery="streamed", bucket_bytes=_ONE_BUCKET, device_memory=False), manifest, None
            )
            for member, link in engines.items()
        }
        return await self._context.planner.agree(f"{self._source} {replica.name}", sources, staging, self._context.deadline)

    async def _prepare(self, report: _Delivery, agreed: TransferPlan, engines: Engines) -> None:
        """Let every rank check that it can serve the version, and connect. Nothing is read yet."""
        context, spec = self._context, self._spec
        limit = RoundDeadline(min(context.deadline.remaining("prepare"), _PREPARE_SECONDS))
        self._check_base(report.replica)
        if earlier := [drop for link in engines.values() for drop in link.drops.waiting(spec.name)]:
            await bounded("dropping earlier versions", limit, asyncio.wait(earlier))  # it may have this number
        spec = report.prepared = structs.replace(spec, base=report.replica.version)  # which may be a later one
        tensors = next(iter(context.trainers.values())).rank.manifest.tensors
        asked = {member: PrepareLora(spec, context.number, tensors, part) for member, part in agreed.slices.items()}
        prepared = await on_all("prepare", limit, engines, asked, Prepared)
        for member, answer in prepared.items():
            if answer.digest != agreed.slices[member].digest:
                raise PlanMismatch(f"{member} acknowledged another plan than it was sent: do both run the same weightsync?")
        report.transports = tuple(sorted({name for answer in prepared.values() for name in answer.transports}))

    def _check_base(self, replica: Replica) -> None:
        context, spec = self._context, self._spec
        replica.require_complete()
        if not takes(replica, spec, late=context.seeding):
            raise VersionError(
                f"{adapter_label(spec.name, context.number)} is for base {spec.base or 'weights that weightsync did not deliver'}, "
                f"and the replica serves {replica.version or 'none of the run'}"
            )


def takes(replica: Replica, spec: AdapterSpec, *, late: bool) -> bool:
    """Whether a replica has the base of an adapter; or, if it gets it ``late``, a later base, with which others have kept it."""
    has = replica.version
    if spec.base is None:
        return replica.state == "registered" and has is None
    kept = late and spec.on_base_update == "keep" and has is not None and has.order >= spec.base.order
    return kept or has == spec.base
