"""Control side of one run: joins, publications and re-seeding.

One coordinator serves one run, on one event loop, and touches no tensor. It may die at any time: its successor rebuilds its state
from the ranks that reconnect, by these rules:

* A replica whose ranks all report the same version (run, number, manifest, digest) is loaded with it. An engine rank takes a
  version label only in a commit, after verification, and reports it only while it serves that version. A replica that reports
  a digest other than the published one is quarantined until it is seeded again. The trainer's ranks report what was published;
  until they do, replicas that differ stay registered: they are neither trusted nor paused.
* A replica whose ranks report different versions becomes dirty and is quarantined at once.
* The contents of the trainer's regions cannot seed replicas, because their digests were lost with the old coordinator. Replicas
  that serve their weights can. Else the next publication brings all replicas up to date. Its number must be above every number
  that a rank reports.

Rounds run one at a time. A publication does not wait for a re-seeding. It cancels it, which quarantines the replica in the middle
of an update within the grace period, and updates the same replicas to the newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from msgspec import structs

from weightsync.config import RoundSettings
from weightsync.coordinator.attendance import Attendance
from weightsync.coordinator.attestations import attested, weigh
from weightsync.coordinator.epochs import REMEDY
from weightsync.coordinator.events import Event, Feed, Joined, Left, ReplicaBytes, RoundEnded
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.publish_barrier import PublishBarrier
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import EngineNode, TrainerNode, TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import left_out
from weightsync.coordinator.round import RoundContext, prepare, quarantine, run_round
from weightsync.coordinator.round_trace import RoundTracer
from weightsync.coordinator.sources import ranks_of, serving_weights
from weightsync.coordinator.status import Gauges, RankStatus, Status
from weightsync.coordinator.stream_round import open_stream, run_stream_round
from weightsync.coordinator.views import rank_status, replica_gauges, replica_status
from weightsync.errors import Aborted, DeadlineExceeded, MembershipError, VersionError, WeightSyncError, readable
from weightsync.gc_pause import collecting_later
from weightsync.model import FIRST_EPOCH, Version
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.protocol.round_log import MissedReplicas
from weightsync.spans import recording, tracing

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 1.0  # from the end of a round to the end of its publication, for the answers
_LARGE_ROUND = 64  # replicas: garbage collection is half of the work of starting the tasks of a thousand replicas
_FAN_OUT_SECONDS = 1.0
_REMEMBERED_RESULTS = 1 << 14
_REMEMBERED_RANKS = 1 << 14


class Coordinator:
    """Control side of one run. Call all methods on one event loop; close it with :meth:`aclose`."""

    def __init__(self, settings: RoundSettings) -> None:
        self.settings = settings
        self._members = Membership()
        self._publications = Publications()
        self._feed = Feed()
        self._rendezvous = PublishBarrier(self._members, self._publications, self._start_publication, self._updating)
        self._attendance = Attendance(self._members)
        self._lock = asyncio.Lock()
        self._pending_publications = 0  # running, or waiting for the running round
        self._queued = 0  # rounds that wait for the running one
        self._seeding: asyncio.Task[RoundResult] | None = None
        self._seeder: asyncio.Task[None] | None = None
        self._wanted: set[str] = set()  # replicas to seed in the background
        self._tasks: set[asyncio.Task[Any]] = set()
        self.rounds = 0
        """Number of the run's last round, which may have been an earlier coordinator's."""
        self._missed = MissedReplicas(_log)
        self._history: deque[RoundResult] = deque(maxlen=settings.history)
        self.traces: deque[RoundTracer] = deque(maxlen=settings.traces)
        """Traces of the last rounds, newest last."""
        self._planner = Planner(settings.plan_bytes)
        self._closed = False

    # Membership.

    def join_trainer(self, node: TrainerNode) -> int:
        """Add a trainer rank that has connected.

        Returns:
            The last version number of its epoch, or -1.

        Raises:
            MembershipError: The rank is in use by another live process, or its world size differs from other ranks'.
            AuthenticationError: The rank's credential was revoked.
            ManifestMismatch: The rank holds other tensors than the trainer's other ranks.
        """
        self._check_open()
        refused = {replica.name: replica.refusal for replica in self._members.replicas.values()}
        self._members.add_trainer(node)
        self._publications.observe(node.rank.epoch or FIRST_EPOCH, node.rank.published)
        version = node.rank.version
        if version is not None and version.run == self.settings.run and version.manifest == node.rank.manifest.fingerprint:
            self._publications.recall(version)
            self._weigh(version.order)
        self._feed.emit(Joined(node.rank.member))
        for replica in self._members.replicas.values():
            if replica.links and replica.refusal not in (None, refused[replica.name]):
                self._warn_of_refusal(replica)
                for link in replica.links.values():
                    link.node.notify(f"rounds skip this engine: {replica.refusal}")
        self._attendance.changed()
        self._seed_wanted()
        for replica in self._members.replicas.values():
            self._stop_preparing(replica)  # it prepares for the trainer's earlier ranks
            self._prepare_ahead(replica)
        return self._rendezvous.epochs.last(node.rank)

    def join_engine(self, node: EngineNode) -> str:
        """Add an engine rank that has connected. A complete replica is seeded if a version can be read from the trainer.

        Returns:
            Why rounds leave the replica out (it holds other tensors than the trainer), or an empty string.

        Raises:
            MembershipError: The name or rank is in use by another live process, or the world size differs from other ranks'.
            AuthenticationError: The rank's credential was revoked.
            ManifestMismatch: The rank holds other tensors than the replica's other ranks.
        """
        self._check_open()
        replica, _ = self._members.add_engine(node)
        self._feed.emit(Joined(node.rank.member))
        if replica.refusal is not None:
            self._warn_of_refusal(replica)
        if replica.complete:
            self._settle(replica)
            self._prepare_ahead(replica)
        self._attendance.changed()
        return replica.refusal or ""

    def leave(self, node: TrainerNode | EngineNode, reason: str = "its connection closed", clean: bool = False) -> None:
        """Remove a connection that has closed: its pending calls fail and its replica is lost. Idempotent.

        Args:
            node: The connection. One that has been replaced is ignored.
            reason: Why it closed.
            clean: Whether the agent closed it on purpose.
        """
        if self._members.remove(node, reason, clean):
            self._feed.emit(Left(node.rank.member, reason))
            self._rendezvous.left(node.rank.member, reason, clean)
            self._attendance.changed()
            if isinstance(node.rank, TrainerRank):  # a hanging rank must not delay the next preparation
                for replica in self._members.replicas.values():
                    self._stop_preparing(replica)

    def _warn_of_refusal(self, replica: Replica) -> None:
        _log.warning("replica %s is refused and rounds skip it: %s", replica.name, replica.refusal)

    def link_of(self, member: str) -> RankHandle[Any]:
        """Return the handle of a connected rank.

        Raises:
            MembershipError: The rank is not connected.
        """
        return self._members.find(member)

    def revoke(self, member: str) -> RankStatus:
        """Close the connection of ``member``, refuse its credential from now on, and tell its process why.

        Raises:
            MembershipError: The rank is not connected.
        """
        link = self.link_of(member)
        self._members.revoke(link)
        reason = "its credential was revoked"
        self.leave(link.node, reason, clean=True)  # a clean end: rounds do not miss the rank
        link.node.dismiss(reason)
        return rank_status(link)

    def progress(self, node: EngineNode, nbytes: int) -> None:
        """Record that an engine rank has ``nbytes`` of the running move in place."""
        replica = self._members.replicas.get(node.rank.replica)
        if replica is not None and replica.state == "updating" and replica.expected:
            replica.received[node.rank.member] = nbytes
            self._feed.emit(ReplicaBytes(replica.name, min(sum(replica.received.values()), replica.expected), replica.expected))

    def _settle(self, replica: Replica) -> None:
        """Determine what a replica serves, now that all of its ranks are connected, and whether to seed it."""
        reported = {link.serving for link in replica.links.values()}
        for held in reported:
            if held is not None and held.run == self.settings.run:
                self._publications.observe(*held.order)
        version = attested(replica, self.settings.run)
        if len(reported) > 1:
            self._distrust(replica, f"its ranks report different versions: {', '.join(sorted(map(str, reported)))}")
        elif version is not None:
            self._weigh(version.order)
        if replica.version is None or replica.version != self._seedable():
            self._wanted.add(replica.name)
        self._seed_wanted()

    def _seedable(self) -> Version | None:
        """Version with which replicas can be seeded now: the one that the trainer holds, or that replicas serve to others."""
        current = self._publications.current(self._members.trainers)
        others = serving_weights(self._members, self._publications)
        return current.version if current else next((replica.version for replica in others), None)

    def _weigh(self, order: tuple[int, int]) -> None:
        """Trust or quarantine all replicas that report the version of this epoch and number."""
        published = self._publications.published.get(order)
        for replica, why in weigh(self._members.replicas.values(), self.settings.run, order, published):
            self._distrust(replica, why)

    def _distrust(self, replica: Replica, why: str) -> None:
        """Mark the replica dirty and quarantine it, because it may be generating."""
        replica.become("dirty", error=why)
        for link in replica.links.values():
            link.serving = link.prepared = None
        replica.quarantining = self._spawn(quarantine(replica.members(), why, self.settings.grace))

    # Publishing.

    async def publish(self, member: str, number: int | None, timeout: float, call: int = 0, step: int | None = None) -> RoundResult:
        """Publish a version. One round runs when all trainer ranks have asked, and every rank gets its result.

        The round gets what is left of the shortest ``timeout``, less the grace period, so that its result arrives in time. A round
        in which replicas failed is a result, not an error.

        Args:
            member: The trainer rank that asks.
            number: Version number; ``None`` takes the next one.
            timeout: Seconds for the whole publication.
            call: Identifies the call. A rank whose connection broke asks again with the same ``call`` and gets the same result.
            step: The training framework's own count, for display.

        Raises:
            VersionError: ``number`` is not above the last one, or ranks ask for different numbers.
            MembershipError: ``member`` is not a trainer rank.
            DeadlineExceeded: ``timeout`` passed. The message names the ranks that did not ask.
            WeightSyncError: Placing failed.
        """
        self._check_open()
        return await self._rendezvous.publish(member, number, RoundDeadline(min(timeout, self.settings.timeout)), call, step)

    def cannot_publish(self, member: str, number: int | None, reason: str) -> None:
        """Fail the publication of ``number`` for all trainer ranks, because ``member`` failed before it could ask."""
        self._check_open()
        _log.warning("%s cannot publish: %s", member, reason)
        self._rendezvous.cannot_publish(member, number, reason)

    async def wait_for_replicas(self, member: str, count: int, timeout: float, names: Collection[str] = ()) -> tuple[str, ...]:
        """Wait until rounds can update ``count`` replicas, ``names`` among them. The trainer rank is notified of missing ones.

        Returns:
            The names of all replicas that are ready.

        Raises:
            DeadlineExceeded: ``timeout`` passed. The message says what the other replicas lack.
            MembershipError: ``member`` is not a trainer rank.
        """
        self._check_open()
        link = self._members.trainers.get(member)
        if link is None:
            raise MembershipError(f"{member} is not a trainer rank and cannot wait for replicas")
        return await self._attendance.wait(count, RoundDeadline(timeout), link.node.notify, names)

    def _start_publication(
        self, epoch: int, number: int, deadline: RoundDeadline, step: int | None = None
    ) -> asyncio.Task[RoundResult]:
        left = deadline.at - asyncio.get_running_loop().time()
        grace = min(self.settings.grace, left / 5)  # a long quarantine must not delay the end of a short publication
        margin = grace + min(_ANSWER_SECONDS, left / 20)
        return self._spawn(self._publish(number, RoundDeadline(left - margin), grace, epoch, step))

    async def _publish(
        self, number: int, deadline: RoundDeadline, grace: float, epoch: int, step: int | None = None
    ) -> RoundResult:
        self._pending_publications += 1
        try:
            if self._seeding is not None:
                self._seeding.cancel()
            async with self._serialize(deadline) as queued:
                if (epoch, number) <= (self._publications.epoch, self._publications.last):
                    raise VersionError(f"version {number} cannot be published: the last one is {self._publications.last}. {REMEDY}")
                replicas, others = self._members.taking_part(), self._members.left_out()
                updated = self._wanted.intersection(replica.name for replica in replicas if replica.complete)
                self._wanted -= updated
                absent = [left_out(replica) for replica in others]
                try:
                    result = await self._run(number, epoch, False, replicas, deadline, grace, queued, absent, step)
                except BaseException:
                    self._wanted |= updated  # nothing was placed: they are seeded if the earlier version can still be read
                    raise
                finally:
                    self._publications.publication_ended()
                self._missed.warn(result)
                if self.settings.retry:
                    self._wanted.update(replica.name for replica in replicas if replica.state == "dirty")
                return result
        finally:
            self._pending_publications -= 1
            self._seed_wanted()

    def _updating(self) -> str:
        """Replicas that the running round is updating, for messages."""
        names = [replica.name for replica in self._members.replicas.values() if replica.state == "updating"]
        return f": {', '.join(names)}" if names else ""

    async def _run(
        self,
        number: int,
        epoch: int,
        seeding: bool,
        replicas: Sequence[Replica],
        deadline: RoundDeadline,
        grace: float,
        queued: float,
        others: Sequence[ReplicaResult] = (),
        step: int | None = None,
    ) -> RoundResult:
        self.rounds += 1
        started = asyncio.get_running_loop().time()
        this = self.rounds
        order = RoundContext(
            round=this,
            number=number,
            epoch=epoch,
            seeding=seeding,
            trainers=self._members.trainers_in_order(),
            replicas=replicas,
            publications=self._publications,
            settings=self.settings,
            deadline=deadline,
            grace=grace,
            emit=self._feed.emit,
            planner=self._planner,
            readable=serving_weights(self._members, self._publications, replicas) if seeding else (),
            left_out=others,
            step=step,
        )
        self._planner.forget_all_but({replica.name for replica in self._members.replicas.values() if replica.links})
        tracer = RoundTracer(self.settings.run, order) if self.settings.traces else None
        try:
            with (
                collecting_later(_FAN_OUT_SECONDS) if len(replicas) >= _LARGE_ROUND else nullcontext(),
                tracing(tracer),
                recording(None if tracer is None else tracer.recorder),
            ):
                result = await (run_stream_round(order) if self._members.streams else run_round(order))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self._keep_trace(tracer, why)
            self._feed.emit(RoundEnded(this, None, why, seeding, asyncio.get_running_loop().time() - started, queued))
            raise
        self._keep_trace(tracer, result.error)
        if tracer is not None:
            transports = {name: nbytes for name, (nbytes, _) in tracer.reads.items()}
            result = structs.replace(result, slowest=tracer.slowest_span, transports=transports)
        self._remember(result)
        self._feed.emit(RoundEnded(this, result, result.error, seeding, result.seconds, queued))
        return result

    def _keep_trace(self, tracer: RoundTracer | None, error: str | None) -> None:
        """Keep what was traced of a round that has ended. Old traces go earlier if they are of very many ranks."""
        if tracer is not None:
            tracer.end(error)
            self.traces.append(tracer)
            while len(self.traces) > 1 and sum(past.size for past in self.traces) > _REMEMBERED_RANKS:
                self.traces.popleft()

    def _remember(self, result: RoundResult) -> None:
        """Keep the result for :meth:`status`. Old results go earlier if they list very many replicas."""
        self._history.append(result)
        while len(self._history) > 1 and sum(len(past.replicas) for past in self._history) > _REMEMBERED_RESULTS:
            self._history.popleft()

    @asynccontextmanager
    async def _serialize(self, deadline: RoundDeadline) -> AsyncIterator[float]:
        """Run the block when no round runs. Yields the seconds of waiting for that."""
        what = "waiting for the running round"
        deadline.remaining(what)
        asked = asyncio.get_running_loop().time()
        self._queued += 1
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took more than {deadline.seconds:g} s") from None
        finally:
            self._queued -= 1
        try:
            yield asyncio.get_running_loop().time() - asked
        finally:
            self._lock.release()

    # Re-seeding.

    async def seed(self, replicas: Iterable[str] | None = None, timeout: float | None = None) -> RoundResult:
        """Deliver the version that the trainer holds, or that replicas serve to others, again. No new one is placed.

        Args:
            replicas: Names of the replicas; by default all that are dirty, new or behind.
            timeout: Seconds for the round; at most, and by default, the settings' value.

        Raises:
            MembershipError: A replica is unknown, incomplete or refused, or none needs seeding.
            StaleSource: No version can be read.
            Aborted: A publication took precedence. It updates these replicas.
        """
        self._check_open()
        limit = RoundDeadline(min(timeout or self.settings.timeout, self.settings.timeout))
        names = self._late() if replicas is None else list(dict.fromkeys(replicas))
        for name in names:
            replica = self._members.replicas.get(name)
            if replica is None:
                raise MembershipError(f"no replica is called {name!r}; replicas are: {', '.join(self._members.replicas) or 'none'}")
            if not replica.complete:
                raise MembershipError(f"replica {name} cannot be seeded: rank {replica.missing_in_words} is not connected")
            if replica.refusal is not None:
                raise MembershipError(f"replica {name} cannot be seeded: {replica.refusal}")
        if not names:
            raise MembershipError("no replica is dirty, new or behind: there is nothing to seed")
        return await self._seed(names, limit)

    async def _seed(self, names: Sequence[str], deadline: RoundDeadline) -> RoundResult:
        async with self._serialize(deadline) as queued:
            if self._pending_publications:
                raise Aborted("a publication took precedence over re-seeding")
            targets = [self._members.replicas[name] for name in names if name in self._members.replicas]
            replicas = [replica for replica in targets if replica.complete and replica.refusal is None]
            version = self._seedable() or self._publications.require(self._members.trainers).version
            epoch, number = version.order
            task: asyncio.Task[RoundResult] = self._spawn(
                self._run(number, epoch, True, replicas, deadline, self.settings.grace, queued)
            )
            self._seeding = task
            try:
                return await task
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if me is not None and me.cancelling():
                    raise
                raise Aborted("a publication took precedence over re-seeding") from None
            finally:
                self._seeding = None

    def _late(self) -> list[str]:
        """Replicas that could be seeded and do not serve the version that can be read."""
        current = self._seedable()
        return [
            replica.name
            for replica in self._members.replicas.values()
            if replica.complete and replica.refusal is None and (current is None or replica.version != current)
        ]

    def _seed_wanted(self) -> None:
        """Start background seeding if a replica needs it and a version can be read.

        Each request gets one attempt. One that a publication cancelled does not count.
        """
        ready = self._wanted and self._seedable() is not None and not self._closed
        if ready and self._seeder is None:
            self._seeder = self._spawn(self._seed_in_background())

    async def _seed_in_background(self) -> None:
        try:
            while self._seedable() is not None:
                names = [name for name in self._late() if name in self._wanted]
                self._wanted.clear()
                if not names:
                    return
                try:
                    await self._seed(names, RoundDeadline(self.settings.timeout))
                except Aborted:
                    self._wanted.update(names)  # a publication that updates them takes them out again; one that fails does not
                    if self._pending_publications:
                        return  # its end starts this again
                except WeightSyncError as error:
                    _log.warning("could not seed %s: %s", ", ".join(names), readable(str(error)))
        finally:
            self._seeder = None

    # Status, and closing.

    def status(self) -> Status:
        """Snapshot of the coordinator."""
        current = self._publications.current(self._members.trainers)
        return Status(
            run=self.settings.run,
            last=self._publications.last,
            version=None if current is None else current.version,
            busy=self._lock.locked(),
            trainer_world_size=self._members.world_size,
            trainer=tuple(rank_status(link) for _, link in sorted(self._members.trainers.items())),
            replicas=tuple(replica_status(replica, self._publications) for _, replica in sorted(self._members.replicas.items())),
            rounds=tuple(self._history),
            epoch=self._publications.epoch,
            now=time.time(),
        )

    def gauges(self) -> Gauges:
        """Values for metrics."""
        return Gauges(
            run=self.settings.run,
            last=self._publications.last,
            busy=self._lock.locked(),
            queued=self._queued,
            trainer=tuple(self._members.trainers),
            epoch=self._publications.epoch,
            missed=len(self._history[-1].missed) if self._history else 0,
            late=len(self._late()),
            replicas=tuple(replica_gauges(replica, self._publications) for _, replica in sorted(self._members.replicas.items())),
            slowest=self.traces[-1].slowest_by_phase if self.traces else {},
        )

    def traced(self, number: int) -> RoundTracer | None:
        """Return what was traced of a round; ``None`` if nothing was or the round is too long ago."""
        return next((past for past in reversed(self.traces) if past.round == number), None)

    def _prepare_ahead(self, replica: Replica) -> None:
        """Prepare a replica for its next round now, unless a round runs or the replica will be seeded, which prepares it too."""
        trainers = self._members.trainers_in_order()
        whole = bool(trainers) and not self._members.missing_trainers(set(trainers))
        possible = replica.complete and replica.refusal is None and replica.preparing is None and not self._lock.locked()
        if whole and possible and self._seedable() is None:
            replica.preparing = self._spawn(self._prepare(replica, trainers))

    async def _prepare(self, replica: Replica, trainers: Mapping[str, RankHandle[TrainerNode]]) -> None:
        try:
            deadline = RoundDeadline(self.settings.timeout)
            if self._members.streams:
                await open_stream(trainers, replica.members(), deadline)
            else:
                await prepare(self._planner, ranks_of(trainers), replica, replica.members(), deadline)
        except WeightSyncError as error:
            _log.info("could not prepare %s ahead of its next round: %s", replica.name, readable(str(error)))
        finally:
            if replica.preparing is asyncio.current_task():
                replica.preparing = None

    def _stop_preparing(self, replica: Replica) -> None:
        task, replica.preparing = replica.preparing, None
        if task is not None:
            task.cancel()

    def subscribe(self) -> AsyncIterator[Event]:
        """Iterate over events from now on, see :class:`~weightsync.coordinator.events.Feed`."""
        return self._feed.subscribe()

    async def aclose(self) -> None:
        """Cancel running work, which quarantines replicas in the middle of an update, and end all subscriptions. Idempotent."""
        self._closed = True
        self._rendezvous.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=3 * self.settings.grace)
        self._feed.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Aborted("the coordinator is closed")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that this coordinator keeps until it ends and that :meth:`aclose` cancels.

        Unexpected errors are logged: some tasks have no caller to raise them.
        """
        task = asyncio.ensure_future(work)
        name = getattr(work, "__qualname__", repr(work))

        def ended(done: asyncio.Task[Any]) -> None:
            self._tasks.discard(done)
            error = None if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, WeightSyncError):
                _log.error("%s ended by an unexpected error", name, exc_info=error)

        self._tasks.add(task)
        task.add_done_callback(ended)
        return task
