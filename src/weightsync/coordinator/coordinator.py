"""Who is here, which version there is, and what is done about it: joins, publications, re-seeding.

One coordinator serves one run, on one event loop, and touches no tensor. It may die at any time: a new one rebuilds the picture
from the ranks that connect again. What it then believes:

* A replica whose ranks all report the same version (run, number, manifest, digest) is loaded with it: an engine rank takes a
  label only in a commit, after verification, and reports it only while it generates with it (paused, it reports none). Whoever
  reports another digest than the one that was published under that number is quarantined until it is seeded again. After a
  restart the trainer's ranks say what was published; until then replicas that differ are registered, neither believed nor paused.
* A replica whose ranks report different things is dirty, and is quarantined at once.
* What the shelves hold cannot be trusted for seeding, since their digests died with the old coordinator: the next publication
  brings everybody up to date. Its number must be above everything that any rank reports.

Rounds run one at a time. A publication does not wait for a re-seeding: it cancels it (the replica in the middle is quarantined,
within the grace) and takes its replicas along to the newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from weightsync.config import RoundSettings
from weightsync.coordinator.attendance import Attendance
from weightsync.coordinator.attestations import attested, weigh
from weightsync.coordinator.epochs import REMEDY
from weightsync.coordinator.events import Event, Feed, Joined, Left, ReplicaBytes, RoundEnded
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Shelves
from weightsync.coordinator.publish_barrier import Rendezvous
from weightsync.coordinator.rank_handle import Limit, Link
from weightsync.coordinator.ranks import EngineNode, TrainerNode, TrainerRank
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import left_out
from weightsync.coordinator.round import Order, prepare, quarantine, run_round
from weightsync.coordinator.status import Gauges, RankStatus, Status
from weightsync.coordinator.views import rank_status, replica_gauges, replica_status
from weightsync.errors import Aborted, DeadlineExceeded, MembershipError, VersionError, WeightSyncError, readable
from weightsync.gc_pause import collecting_later
from weightsync.model import FIRST_EPOCH
from weightsync.protocol.messages import ReplicaResult, RoundResult

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 1.0  # between the end of a round and that of its publication, for the answers
_LARGE_ROUND = 64  # replicas: while a thousand replicas' tasks are made, collecting garbage is half of the work
_FAN_OUT_SECONDS = 1.0
_REMEMBERED_RESULTS = 1 << 14


class Coordinator:
    """The control side of one run. All methods are called on one event loop; close it with :meth:`aclose`."""

    def __init__(self, settings: RoundSettings) -> None:
        self.settings = settings
        self._members = Membership()
        self._shelves = Shelves()
        self._feed = Feed()
        self._rendezvous = Rendezvous(self._members, self._shelves, self._start_publication, self._updating)
        self._attendance = Attendance(self._members)
        self._turn = asyncio.Lock()
        self._publications = 0  # running or waiting for their turn
        self._seeding: asyncio.Task[RoundResult] | None = None
        self._seeder: asyncio.Task[None] | None = None
        self._wanted: set[str] = set()  # replicas to seed in the background
        self._tasks: set[asyncio.Task[Any]] = set()
        self._rounds = 0
        self._without: dict[str, str] = {}  # replicas that the last publication did not reach, and their states
        self._history: deque[RoundResult] = deque(maxlen=settings.history)
        self._planner = Planner(settings.plan_bytes)
        self._closed = False

    # Membership.

    def join_trainer(self, node: TrainerNode) -> int:
        """A trainer rank has connected. Returns the last version number of its epoch, or -1.

        Raises :class:`~weightsync.errors.MembershipError` (rank in use by another live process, second trainer, other world
        size), :class:`~weightsync.errors.AuthenticationError` (revoked) or :class:`~weightsync.errors.ManifestMismatch` (other
        tensors than the trainer's other ranks).
        """
        self._check_open()
        refused = {replica.name: replica.refusal for replica in self._members.replicas.values()}
        self._members.add_trainer(node)
        self._shelves.observe(node.rank.epoch or FIRST_EPOCH, node.rank.published)
        version = node.rank.version
        if version is not None and version.run == self.settings.run and version.manifest == node.rank.manifest.fingerprint:
            self._shelves.recall(version)
            self._weigh(version.order)
        self._feed.emit(Joined(node.rank.member))
        for replica in self._members.replicas.values():
            if replica.links and replica.refusal not in (None, refused[replica.name]):
                self._warn_of_refusal(replica)
                for link in replica.links.values():
                    link.node.notify(f"rounds leave this engine out: {replica.refusal}")
        self._attendance.changed()
        self._seed_wanted()
        for replica in self._members.replicas.values():
            self._stop_preparing(replica)  # for the trainer as it was
            self._prepare_ahead(replica)
        return self._rendezvous.epochs.last(node.rank)

    def join_engine(self, node: EngineNode) -> str:
        """An engine rank has connected. When its replica is complete and a version is on the shelves, it is seeded.

        Returns why rounds leave its replica out (it holds other tensors than the trainer), or nothing. Raises
        :class:`~weightsync.errors.MembershipError` (name or rank in use by another live process, other world size),
        :class:`~weightsync.errors.AuthenticationError` (revoked) or :class:`~weightsync.errors.ManifestMismatch` (other tensors
        than the replica's other ranks).
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
        """This connection is gone: its pending calls fail, its replica is lost. Harmless for one that was replaced meanwhile.

        ``clean`` says that the agent was closed on purpose.
        """
        if self._members.remove(node, reason, clean):
            self._feed.emit(Left(node.rank.member, reason))
            self._rendezvous.left(node.rank.member, reason, clean)
            self._attendance.changed()
            if isinstance(node.rank, TrainerRank):  # one that hung must not hold up the next
                for replica in self._members.replicas.values():
                    self._stop_preparing(replica)

    def _warn_of_refusal(self, replica: Replica) -> None:
        _log.warning("replica %s is refused, rounds leave it out: %s", replica.name, replica.refusal)

    def link_of(self, member: str) -> Link[Any]:
        """The connection of a rank. Raises :class:`~weightsync.errors.MembershipError` if it has none."""
        return self._members.find(member)

    def revoke(self, member: str) -> RankStatus:
        """Close this rank's connection, and refuse its credential from now on; the process is told why.

        Raises :class:`~weightsync.errors.MembershipError` if no such rank is connected.
        """
        link = self.link_of(member)
        self._members.revoke(link)
        reason = "its credential was revoked"
        self.leave(link.node, reason, clean=True)  # on purpose: rounds do not miss it
        link.node.dismiss(reason)
        return rank_status(link)

    def progress(self, node: EngineNode, nbytes: int) -> None:
        """An engine rank has ``nbytes`` of the running move in place."""
        replica = self._members.replicas.get(node.rank.replica)
        if replica is not None and replica.state == "updating" and replica.expected:
            replica.received[node.rank.member] = nbytes
            self._feed.emit(ReplicaBytes(replica.name, min(sum(replica.received.values()), replica.expected), replica.expected))

    def _settle(self, replica: Replica) -> None:
        """All ranks of a replica are here: what does it serve, and should it be seeded?"""
        reported = {link.serving for link in replica.links.values()}
        version = attested(replica, self.settings.run)
        if len(reported) > 1:
            self._distrust(replica, f"its ranks report different versions: {', '.join(sorted(map(str, reported)))}")
        elif version is not None:
            self._shelves.observe(*version.order)
            self._weigh(version.order)
        current = self._shelves.current(self._members.trainers)
        if current is None or replica.version != current.version:
            self._wanted.add(replica.name)
            self._seed_wanted()

    def _weigh(self, order: tuple[int, int]) -> None:
        """Believe or distrust all replicas that report the version of this epoch and number."""
        for replica, why in weigh(self._members.replicas.values(), self.settings.run, order, self._shelves.published.get(order)):
            self._distrust(replica, why)

    def _distrust(self, replica: Replica, why: str) -> None:
        """Dirty, and told so: it may be generating."""
        replica.become("dirty", error=why)
        for link in replica.links.values():
            link.serving = link.prepared = None
        replica.quarantining = self._spawn(quarantine(replica.members(), why, self.settings.grace))

    # Publishing.

    async def publish(self, member: str, number: int | None, timeout: float, call: int = 0) -> RoundResult:
        """A trainer rank publishes ``number`` (``None``: the next). When all have asked, one round runs, and all get its result.

        A rank whose connection broke while it waited asks again with the same ``call``, and gets the same result.
        The round gets what is left of the shortest ``timeout``, less the grace, so that its result still arrives in time.
        Raises :class:`~weightsync.errors.VersionError` (not above the last one, or ranks that differ),
        :class:`~weightsync.errors.MembershipError` (not a trainer rank), :class:`~weightsync.errors.DeadlineExceeded` naming the
        ranks that did not come, or what made placing fail. A round in which replicas failed is a result, not an error.
        """
        self._check_open()
        return await self._rendezvous.publish(member, number, Limit(min(timeout, self.settings.timeout)), call)

    def cannot_publish(self, member: str, number: int | None, reason: str) -> None:
        """A trainer rank failed before it could ask to publish ``number``: the others are told, instead of waiting for it."""
        self._check_open()
        _log.warning("%s cannot publish: %s", member, reason)
        self._rendezvous.cannot_publish(member, number, reason)

    async def wait_for_replicas(self, member: str, count: int, timeout: float) -> tuple[str, ...]:
        """The replicas that rounds can take in, as soon as there are ``count``; the trainer rank is told for whom it waits.

        Raises :class:`~weightsync.errors.DeadlineExceeded` naming what the others lack, or
        :class:`~weightsync.errors.MembershipError` (not a trainer rank).
        """
        self._check_open()
        link = self._members.trainers.get(member)
        if link is None:
            raise MembershipError(f"{member} is not a rank of the trainer, and cannot wait for replicas")
        return await self._attendance.wait(count, Limit(timeout), link.node.notify)

    def _start_publication(self, epoch: int, number: int, limit: Limit) -> asyncio.Task[RoundResult]:
        left = limit.at - asyncio.get_running_loop().time()
        grace = min(self.settings.grace, left / 5)  # a short publication must not end later for the sake of a long quarantine
        margin = grace + min(_ANSWER_SECONDS, left / 20)
        return self._spawn(self._publish(number, Limit(left - margin), grace, epoch))

    async def _publish(self, number: int, limit: Limit, grace: float, epoch: int) -> RoundResult:
        self._publications += 1
        try:
            if self._seeding is not None:
                self._seeding.cancel()
            async with self._take_turn(limit):
                if (epoch, number) <= (self._shelves.epoch, self._shelves.last):
                    raise VersionError(f"version {number} cannot be published: the last one is {self._shelves.last}. {REMEDY}")
                replicas, others = self._members.taking_part(), self._members.left_out()
                self._wanted.difference_update(replica.name for replica in replicas if replica.complete)
                absent = [left_out(replica) for replica in others]
                try:
                    result = await self._run(number, epoch, False, replicas, limit, grace, absent)
                finally:
                    self._shelves.publication_ended()
                self._warn_of_failures(result)
                if self.settings.retry:
                    self._wanted.update(replica.name for replica in replicas if replica.state == "dirty")
                return result
        finally:
            self._publications -= 1
            self._seed_wanted()

    def _warn_of_failures(self, result: RoundResult) -> None:
        """Log which replicas the publication did not reach, where it is not the same as after the one before."""
        without = {one.name: one.state for one in result.replicas if one.error is not None}
        if without and without != self._without:
            listed = "; ".join(f"{one.name} ({one.state}): {one.error}" for one in result.replicas if one.error is not None)
            _log.warning("version %s did not reach %s", result.version, listed)
        self._without = without

    def _updating(self) -> str:
        """Replicas in the middle of the running round, for messages."""
        names = [replica.name for replica in self._members.replicas.values() if replica.state == "updating"]
        return f": {', '.join(names)}" if names else ""

    async def _run(
        self,
        number: int,
        epoch: int,
        seeding: bool,
        replicas: Sequence[Replica],
        limit: Limit,
        grace: float,
        others: Sequence[ReplicaResult] = (),
    ) -> RoundResult:
        self._rounds += 1
        this = self._rounds
        order = Order(
            round=this,
            number=number,
            epoch=epoch,
            seeding=seeding,
            trainers=dict(sorted(self._members.trainers.items(), key=lambda item: item[1].node.rank.rank)),
            replicas=replicas,
            shelves=self._shelves,
            settings=self.settings,
            limit=limit,
            grace=grace,
            emit=self._feed.emit,
            planner=self._planner,
            left_out=others,
        )
        self._planner.forget_all_but({replica.name for replica in self._members.replicas.values() if replica.links})
        try:
            with collecting_later(_FAN_OUT_SECONDS) if len(replicas) >= _LARGE_ROUND else nullcontext():
                result = await run_round(order)
        except BaseException as error:
            self._feed.emit(RoundEnded(this, None, f"{type(error).__name__}: {error}"))
            raise
        self._remember(result)
        self._feed.emit(RoundEnded(this, result, result.error))
        return result

    def _remember(self, result: RoundResult) -> None:
        """For :meth:`status`: as many rounds as the settings say, and fewer where each has very many replicas."""
        self._history.append(result)
        while len(self._history) > 1 and sum(len(one.replicas) for one in self._history) > _REMEMBERED_RESULTS:
            self._history.popleft()

    @asynccontextmanager
    async def _take_turn(self, limit: Limit) -> AsyncIterator[None]:
        what = "waiting for the running round"
        limit.remaining(what)
        try:
            async with asyncio.timeout_at(limit.at):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took more than {limit.seconds:g} s") from None
        try:
            yield
        finally:
            self._turn.release()

    # Re-seeding.

    async def seed(self, replicas: Iterable[str] | None = None, timeout: float | None = None) -> RoundResult:
        """Bring ``replicas`` (by default all that are dirty, new or late) to the version that is on the shelves, without placing.

        Raises :class:`~weightsync.errors.MembershipError` (unknown, incomplete or refused replica, or none that needs it),
        :class:`~weightsync.errors.StaleSource` (nothing on the shelves), :class:`~weightsync.errors.Aborted` (a publication took
        precedence; it takes these replicas along).
        """
        self._check_open()
        limit = Limit(min(timeout or self.settings.timeout, self.settings.timeout))
        names = self._late() if replicas is None else list(dict.fromkeys(replicas))
        for name in names:
            replica = self._members.replicas.get(name)
            if replica is None:
                raise MembershipError(f"no replica is called {name!r}; there are: {', '.join(self._members.replicas) or 'none'}")
            if not replica.complete:
                raise MembershipError(f"replica {name} cannot be seeded: rank {replica.missing_in_words} is not connected")
            if replica.refusal is not None:
                raise MembershipError(f"replica {name} cannot be seeded: {replica.refusal}")
        if not names:
            raise MembershipError("no replica is dirty, new or late: there is nothing to seed")
        return await self._seed(names, limit)

    async def _seed(self, names: Sequence[str], limit: Limit) -> RoundResult:
        async with self._take_turn(limit):
            if self._publications:
                raise Aborted("a publication took precedence over re-seeding")
            found = [self._members.replicas[name] for name in names if name in self._members.replicas]
            replicas = [replica for replica in found if replica.complete and replica.refusal is None]
            epoch, number = self._shelves.require(self._members.trainers).version.order
            task: asyncio.Task[RoundResult] = self._spawn(self._run(number, epoch, True, replicas, limit, self.settings.grace))
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
        """Replicas that could be seeded and do not serve what the shelves hold."""
        current = self._shelves.current(self._members.trainers)
        return [
            replica.name
            for replica in self._members.replicas.values()
            if replica.complete and replica.refusal is None and (current is None or replica.version != current.version)
        ]

    def _seed_wanted(self) -> None:
        """Start the background seeding if there is something to do and it is possible. Each wish gets one attempt."""
        ready = self._wanted and self._shelves.current(self._members.trainers) and not self._closed
        if ready and self._seeder is None:
            self._seeder = self._spawn(self._seed_in_background())

    async def _seed_in_background(self) -> None:
        try:
            while self._shelves.current(self._members.trainers) is not None:
                names = [name for name in self._late() if name in self._wanted]
                self._wanted.clear()
                if not names:
                    return
                try:
                    await self._seed(names, Limit(self.settings.timeout))
                except WeightSyncError as error:
                    _log.warning("seeding %s: %s", ", ".join(names), readable(str(error)))
        finally:
            self._seeder = None

    # Looking, and the end.

    def status(self) -> Status:
        """A snapshot."""
        current = self._shelves.current(self._members.trainers)
        return Status(
            run=self.settings.run,
            last=self._shelves.last,
            version=None if current is None else current.version,
            busy=self._turn.locked(),
            trainer_world_size=self._members.world_size,
            trainer=tuple(rank_status(link) for _, link in sorted(self._members.trainers.items())),
            replicas=tuple(replica_status(replica, self._shelves) for _, replica in sorted(self._members.replicas.items())),
            rounds=tuple(self._history),
            epoch=self._shelves.epoch,
            now=time.time(),
        )

    def gauges(self) -> Gauges:
        """What there is to measure."""
        return Gauges(
            run=self.settings.run,
            last=self._shelves.last,
            busy=self._turn.locked(),
            trainer=tuple(self._members.trainers),
            epoch=self._shelves.epoch,
            missed=sum(one.error is not None for one in self._history[-1].replicas) if self._history else 0,
            replicas=tuple(replica_gauges(replica, self._shelves) for _, replica in sorted(self._members.replicas.items())),
        )

    def _prepare_ahead(self, replica: Replica) -> None:
        """Let a replica get ready for its next round now: not where it is seeded, which prepares it too, nor beside a round."""
        trainers = dict(self._members.trainers)
        whole = bool(trainers) and not self._members.missing_trainers(set(trainers))
        possible = replica.complete and replica.refusal is None and replica.preparing is None and not self._turn.locked()
        if whole and possible and self._shelves.current(trainers) is None:
            replica.preparing = self._spawn(self._prepare(replica, trainers))

    async def _prepare(self, replica: Replica, trainers: Mapping[str, Link[TrainerNode]]) -> None:
        try:
            await prepare(self._planner, trainers, replica, replica.members(), Limit(self.settings.timeout))
        except WeightSyncError as error:
            _log.info("preparing %s ahead of its next round: %s", replica.name, readable(str(error)))
        except Exception:  # noqa: BLE001 - nobody waits for this: a bug met here is logged, and met again by the round
            _log.exception("preparing %s ahead of its next round failed by an unexpected error", replica.name)
        finally:
            if replica.preparing is asyncio.current_task():
                replica.preparing = None

    def _stop_preparing(self, replica: Replica) -> None:
        task, replica.preparing = replica.preparing, None
        if task is not None:
            task.cancel()

    def subscribe(self) -> AsyncIterator[Event]:
        """Events from now on; see :class:`~weightsync.coordinator.events.Feed`."""
        return self._feed.subscribe()

    async def aclose(self) -> None:
        """Cancel what runs (replicas in the middle of an update are quarantined) and end all subscriptions. Safe twice."""
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
        """A task that this coordinator owns: kept until it ends, cancelled by :meth:`aclose`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
