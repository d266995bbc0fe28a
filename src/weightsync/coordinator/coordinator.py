"""Control side of one run: joins, publications and re-seeding.

One coordinator serves one run, on one event loop, and touches no tensor. It may die at any time: its successor rebuilds its state
from the ranks that reconnect, by these rules:

* A replica whose ranks all report the same version (run, number, manifest, digest) is loaded with it. An engine rank takes a
  version label only in a commit, after verification, and reports it only while it serves that version. A replica that reports
  a digest other than the published one is quarantined until it is seeded again. The trainer's ranks report what was published;
  until they do, replicas that differ stay registered: they are neither trusted nor paused.
* A replica whose ranks report different versions becomes dirty and is quarantined at once.
* The trainer's regions cannot seed replicas, because their digests were lost with the old coordinator. Replicas that serve their
  weights can, once a trainer rank has reported the version; what replicas report is not enough. The next publication's number must
  be above every number that a trainer rank reports; if none reports any, above those of the engines that are connected.

Rounds run one at a time. A publication does not wait for a re-seeding. It cancels it, which quarantines the replica in the middle
of an update within the grace period, and updates the same replicas to the newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from msgspec import structs

from weightsync.config import RoundSettings
from weightsync.coordinator.agreement import PreparingAhead
from weightsync.coordinator.alerts import alerts_of
from weightsync.coordinator.attendance import Attendance
from weightsync.coordinator.audits import Audits
from weightsync.coordinator.events import Event, Feed, Joined, Left, ReplicaBytes, ReplicaPhase, RoundEnded
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.loras import Loras
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.postponed import Postponed
from weightsync.coordinator.publications import REMEDY, Publications
from weightsync.coordinator.publish_barrier import AgreedPublication, PublishBarrier
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, bounded
from weightsync.coordinator.ranks import AdapterRank, EngineRank, RankNode, TrainerRank
from weightsync.coordinator.replicas import Replica, replica_gauges, replica_status, reported_version, validate
from weightsync.coordinator.report import left_out
from weightsync.coordinator.round import quarantine, run_round
from weightsync.coordinator.round_context import RoundContext, serving_weights
from weightsync.coordinator.round_trace import PastRounds, RoundTracer
from weightsync.coordinator.status import Gauges, RankStatus, Status
from weightsync.coordinator.stored_versions import STORE_SECONDS, StoredSource, StoredVersions
from weightsync.coordinator.stream_round import run_stream_round
from weightsync.errors import Aborted, MembershipError, RoundFailed, StaleSource, VersionError, WeightSyncError, readable
from weightsync.gc_pause import collecting_later
from weightsync.model import FIRST_EPOCH, Version
from weightsync.protocol.messages import Done, EndCall, LetGo, Publish, ReplicaResult, RoundResult, WaitForReplicas
from weightsync.protocol.round_log import MissedReplicas
from weightsync.protocol.store_messages import STORE
from weightsync.spans import recording, tracing
from weightsync.store.signing import SigningKey

_log = logging.getLogger(__name__)
_LARGE_ROUND = 64  # replicas: garbage collection is half of the work of starting the tasks of a thousand replicas
_FAN_OUT_SECONDS = 1.0


class Coordinator:
    """Control side of one run, on one event loop; close it with :meth:`aclose`. ``store_key`` makes the key of stored versions."""

    def __init__(self, settings: RoundSettings, store_key: Callable[[], SigningKey] | None = None) -> None:
        self.settings = settings
        self._members = Membership()
        self._publications, self._feed = Publications(), Feed()
        self._rendezvous = PublishBarrier(self._members, self._publications, self._start_publication, self._updating)
        self.attendance = Attendance(self._members)
        self.stored = StoredVersions(self._members, self._publications, store_key)
        """What the trainer stores."""
        self._lock = asyncio.Lock()
        self._pending_publications = 0  # running, or waiting for the running round
        self._queued = 0  # rounds that wait for the running one
        self._seeding: asyncio.Task[RoundResult] | None = None
        self._seeder: asyncio.Task[None] | None = None
        self._wanted: set[str] = set()  # replicas to seed in the background
        self._again = Postponed(STORE_SECONDS, self._seed_wanted)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.rounds = 0
        """Number of the run's last round, which may have been an earlier coordinator's."""
        self.announced: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """Returns when routers know which replicas serve now; by default there are none."""
        self._pause_mode = settings.pause_mode  # of the last publication's round: re-seeding must not abort what it would keep
        self._missed = MissedReplicas(_log)
        self.past = PastRounds(settings.history, settings.traces)
        self._planner = Planner(settings.plan_bytes)
        self._keyed = KeyedDigester(self._members, self._planner)
        self._audits = Audits(settings, self._exclude_and_seed, self._feed.emit, self._spawn)
        self._preparing = PreparingAhead(self._members, self._planner, settings, self._lock, self._spawn)
        self.loras = Loras(settings, self._members, self._keyed, (self._lock, self._serialize), self._spawn)
        self._closed, self._started = False, time.time()

    # Membership.

    def join_trainer(self, node: RankNode[TrainerRank]) -> int:
        """Add a trainer rank that has connected. Return the last version number of its epoch, or -1.

        Raises:
            MembershipError: The rank is in use by another live process, or its world size differs from other ranks'.
            AuthenticationError: The rank's credential was revoked.
            ManifestMismatch: The rank holds other tensors than the trainer's other ranks.
        """
        self._check_open()
        refused = {replica.name: replica.refusal for replica in self._members.replicas.values()}
        self._rendezvous.join(node)
        self._publications.claim("trainer", node.rank.member, node.rank.hello.epoch or FIRST_EPOCH, node.rank.hello.published)
        self._publications.placed_before(node.rank.hello.order)
        version = node.rank.hello.version
        if version is not None and version.run == self.settings.run and version.manifest == node.rank.manifest.fingerprint:
            self._publications.published.setdefault(version.order, version)
            self._check_reports(version.order)
        self._feed.emit(Joined(node.rank.member))
        for replica in self._members.replicas.values():
            if replica.links and replica.refusal not in (None, refused[replica.name]):
                _log.warning("replica %s is refused and rounds skip it: %s", replica.name, replica.refusal)
                for link in replica.links.values():
                    link.node.notify(f"rounds skip this engine: {replica.refusal}")
        self.attendance.changed()
        self._seed_wanted()
        self._preparing.stop_all()  # it prepares for the trainer's earlier ranks
        for replica in self._members.replicas.values():
            self._prepare_ahead(replica)
        return self._rendezvous.epochs.last(node.rank)

    def join_engine(self, node: RankNode[EngineRank]) -> str:
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
            _log.warning("replica %s is refused and rounds skip it: %s", replica.name, replica.refusal)
        if replica.complete:
            self._reconcile(replica)
            self._prepare_ahead(replica)
            self.loras.replica_joined(replica)
            self._preparing.replica_joined(replica)
        self.attendance.changed()
        return replica.refusal or ""

    def leave(self, node: RankNode[Any], reason: str = "its connection closed", clean: bool = False) -> None:
        """Remove a connection that has closed, ``clean`` if on purpose: its calls fail and its replica is lost. Idempotent."""
        if isinstance(node.rank, AdapterRank):
            if self.loras.leave(node, reason, clean):
                self._preparing.publisher_left(LetGo(adapters=True))
        elif self._members.remove(node, reason, clean):
            self._publications.withdraw(node.rank.member)
            self._feed.emit(Left(node.rank.member, reason))
            self._rendezvous.left(node.rank.member, reason, clean)
            self.attendance.changed()
            if isinstance(node.rank, TrainerRank):
                self._preparing.trainer_left()
                # A read from this trainer that failed before anybody knew why is not repeated by itself. The store may have it.
                self._seed_wanted(replica.name for replica in self._members.replicas.values() if replica.version is None)
            else:
                self.loras.replica_left(node.rank.hello.name)

    def link_of(self, member: str) -> RankHandle[Any]:
        """Return the handle of a connected rank.

        Raises:
            MembershipError: The rank is not connected.
        """
        return self.loras.find(member) or self._members.find(member)

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
        return link.status()

    def progress(self, rank: EngineRank, nbytes: int) -> None:
        """Record that an engine rank has ``nbytes`` of the running move in place."""
        replica = self._members.replicas.get(rank.hello.name)
        if replica is not None and replica.state == "updating" and replica.expected:
            replica.received[rank.member] = nbytes
            self._feed.emit(ReplicaBytes(replica.name, min(sum(replica.received.values()), replica.expected), replica.expected))

    def refuted(self, member: str, version: Version, why: str) -> None:
        """Record that an engine rank has found other bytes in its parameters than it installed of ``version``."""
        link = self._members.find(member)
        self._audits.refuted(self._members.replicas[link.rank.hello.name], link, version, why)

    def _reconcile(self, replica: Replica) -> None:
        """Determine what a replica serves, now that all of its ranks are connected, and whether to seed it."""
        reported = {link.serving for link in replica.links.values()}
        for member, link in replica.members().items():
            if (taken := link.rank.hello.version or link.serving) is not None and taken.run == self.settings.run:
                self._publications.claim("engine", member, *taken.order)
        version = reported_version(replica, self.settings.run)
        if replica.refuted:
            self._audits.exclude(replica)
        elif len(reported) > 1:
            self._exclude(replica, f"its ranks report different versions: {', '.join(sorted(map(str, reported)))}")
        elif version is not None:
            self._check_reports(version.order)
        self._seed_wanted((replica.name,) if self._updates(replica, self._seedable()) else ())

    def _seedable(self) -> Version | None:
        """Version with which replicas can be seeded now: of the trainer, of replicas that serve it to others, or of the store."""
        current = self._publications.current(self._members.trainers)
        others = self._peers()
        stored = None if self._members.streams or self.stored.newest is None else self.stored.newest.version
        return current.version if current else next((replica.version for replica in others), stored)

    def _peers(self, readers: Collection[Replica] = ()) -> Sequence[Replica]:
        """Replicas from which the ``readers`` may get the last version: if it cannot be compared, a stored one is better."""
        others = serving_weights(self._members, self._publications, readers)
        return [other for other in others if self.stored.newest is None or self._keyed.has(other.version)]

    def _stored(self, epoch: int, number: int) -> StoredSource | None:
        """The version in the store, if it is this one and the trainer does not hold it."""
        stored = self.stored.source
        held = self._publications.current(self._members.trainers) is not None
        return None if held or stored is None or stored.version.order != (epoch, number) else stored

    def _updates(self, replica: Replica, version: Version | None) -> bool:
        """Whether seeding with ``version`` would help a replica. One that is only in the store may be older than what it serves."""
        if version is None or replica.version is None:
            return True
        only_stored = self._stored(*version.order) is not None and not self._peers()
        return replica.version != version and not only_stored

    def _check_reports(self, order: tuple[int, int]) -> None:
        """Trust all replicas that report the version of this epoch and number, or take them out of service."""
        published = self._publications.published.get(order)
        for replica, why in validate(self._members.replicas.values(), self.settings.run, order, published):
            self._exclude(replica, why)
        self._audits.start(self._members.replicas.values())

    def _exclude(self, replica: Replica, why: str) -> None:
        """Take the replica out of service (``dirty``) and pause it, because it may be generating."""
        replica.become("dirty", error=why)
        self._feed.emit(ReplicaPhase(self.rounds, replica.name, "quarantine"))
        for link in replica.links.values():
            link.serving, link.prepared, link.refuted = None, None, ""
        replica.quarantining = self._spawn(quarantine(replica.members(), why, self.settings.grace))

    def _exclude_and_seed(self, replica: Replica, why: str) -> None:
        """Take a replica out of service whose own digests refute its label, and seed it as soon as a version can be read."""
        self._exclude(replica, why)
        self._seed_wanted((replica.name,))

    # Publishing.

    async def publish(self, member: str, asked: Publish, timeout: float) -> RoundResult:
        """Publish a version. One round runs when all trainer ranks have asked, and every rank gets its result.

        The round gets what is left of the shortest ``timeout``, less the grace period, so that its result arrives in time. A round
        in which replicas failed is a result, not an error. A rank whose connection broke asks again with the same call and gets
        the same result. Later re-seeding pauses as this publication does.

        Raises:
            RoundFailed: An earlier coordinator was lost when only some ranks had placed the version, or the store cannot be read.
            VersionError: The number is not above the last one, or ranks ask for different numbers, steps or counts.
            ConfigurationError: Ranks ask for different pause modes.
            MembershipError: ``member`` is not a trainer rank.
            DeadlineExceeded: ``timeout`` passed. The message names the ranks that did not ask.
            WeightSyncError: Placing failed.
        """
        self._check_open()
        limit = RoundDeadline(min(timeout, self.settings.timeout))
        try:
            await self.stored.catch_up(limit)
        except RoundFailed as error:
            self._rendezvous.cannot_publish(member, asked.number, str(error), asked.step, asked.count)
            raise
        return await self._rendezvous.publish(member, asked, limit)

    def cannot_publish(self, member: str, number: int | None, reason: str, step: int | None = None, count: int = 0) -> None:
        """Fail the publication of ``number`` for all trainer ranks, because ``member`` failed before it could ask."""
        self._check_open()
        _log.warning("%s cannot publish: %s", member, reason)
        self._rendezvous.cannot_publish(member, number, reason, step, count)

    async def end_call(self, ended: EndCall, timeout: float) -> None:
        """Tell all engine ranks that a framework's call is over. Returns when those that answer know it."""
        links = [link for replica in self._members.replicas.values() for link in replica.links.values()]
        await asyncio.gather(*(link.start(link.ask(ended, Done, timeout)) for link in links), return_exceptions=True)

    async def wait_for_replicas(self, member: str, asked: WaitForReplicas, timeout: float) -> tuple[str, ...]:
        """Return all ready replicas when those that are ``asked`` for are among them. The rank is notified of missing ones.

        Raises:
            ManifestMismatch: A replica is refused, and ``asked`` says to raise then.
            DeadlineExceeded: ``timeout`` passed. The message says what the other replicas lack.
            MembershipError: ``member`` is not a trainer rank, or waits too often already.
        """
        self._check_open()
        link = self._members.trainers.get(member) or self.loras.find(member)
        if link is None:
            raise MembershipError(f"{member} is not a trainer rank and cannot wait for replicas")
        return await self.attendance.wait(link, asked, RoundDeadline(timeout))

    def _start_publication(self, asked: AgreedPublication) -> asyncio.Task[RoundResult]:
        return self._spawn(self._publish(asked, *asked.limits(self.settings.grace)))

    async def _publish(self, asked: AgreedPublication, deadline: RoundDeadline, grace: float) -> RoundResult:
        self._pending_publications += 1
        try:
            if self._seeding is not None:
                self._seeding.cancel()
            async with self._serialize(deadline) as queued:
                order = asked.epoch, asked.number
                if order < (last := self._publications.own) or (order == last and asked.version is None):
                    raise VersionError(f"version {asked.number} cannot be published: the last one is {last[1]}. {REMEDY}")
                await self.attendance.returned(self.settings.require, deadline.remaining("the round") / 4)
                known = asked.version and self._publications.published.get(order)
                replicas, absent = self._members.taking_part(known), [left_out(other) for other in self._members.left_out(known)]
                updated = self._wanted.intersection(replica.name for replica in replicas if replica.complete)
                self._wanted -= updated
                self._pause_mode = asked.pause_mode or self.settings.pause_mode
                try:
                    result = await self._run(asked, replicas, deadline, grace, queued, absent)
                    await self._keyed.keep(result.version, deadline)
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
        self, asked: AgreedPublication, replicas: Sequence[Replica], deadline: RoundDeadline, grace: float, queued: float,
        others: Sequence[ReplicaResult] = (), seeding: bool = False,
    ) -> RoundResult:  # fmt: skip
        this = self.rounds = self.rounds + 1
        started = asyncio.get_running_loop().time()
        order = RoundContext(
            round=this,
            number=asked.number,
            epoch=asked.epoch,
            seeding=seeding,
            trainers=self._members.trainers_in_order(),
            replicas=replicas,
            publications=self._publications,
            settings=self.settings,
            deadline=deadline,
            grace=grace,
            emit=self._feed.emit,
            exclude=self._exclude_and_seed,
            pause_mode=self._pause_mode,
            keyed=self._keyed,
            planner=self._planner,
            announced=self.announced,
            readable=self._peers(replicas) if seeding else (),
            stored=self._stored(asked.epoch, asked.number) if seeding else None,
            left_out=others,
            step=asked.step,
            calls=asked.calls,
        )
        self._planner.keep_only({replica.name for replica in self._members.replicas.values() if replica.links})
        tracer = RoundTracer(self.settings.run, order) if self.settings.traces else None
        try:
            with (
                self._audits.held([*replicas, *order.readable]),
                collecting_later(_FAN_OUT_SECONDS) if len(replicas) >= _LARGE_ROUND else nullcontext(),
                tracing(tracer),
                recording(None if tracer is None else tracer.recorder),
            ):
                result = await (run_stream_round(order) if self._members.streams else run_round(order))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self.past.keep_trace(tracer, why)
            if isinstance(error, Exception):
                self.past.failure = (this, why, time.time())
            self._feed.emit(RoundEnded(this, None, why, seeding, asyncio.get_running_loop().time() - started, queued))
            raise
        self.past.keep_trace(tracer, result.error)
        if tracer is not None:
            transports = {name: nbytes for name, (nbytes, _) in tracer.reads.items()}
            result = structs.replace(result, slowest=tracer.slowest_span, transports=transports)
        self.past.keep(result)
        self.loras.base_updated()
        self._feed.emit(RoundEnded(this, result, result.error, seeding, result.seconds, queued))
        return result

    @asynccontextmanager
    async def _serialize(self, deadline: RoundDeadline) -> AsyncIterator[float]:
        """Run the block when no round runs. Yields the seconds of waiting for that."""
        what = "waiting for the running round"
        deadline.remaining(what)
        asked = asyncio.get_running_loop().time()
        self._queued += 1
        try:
            await bounded(what, deadline, self._lock.acquire())
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
            Aborted: A publication took precedence, or another round updated these replicas.
        """
        self._check_open()
        limit = RoundDeadline(min(timeout or self.settings.timeout, self.settings.timeout))
        names = self._late() if replicas is None else list(dict.fromkeys(replicas))
        for name in names:
            replica = self._members.replicas.get(name)
            if replica is None:
                raise MembershipError(f"no replica is called {name!r}; replicas are: {', '.join(self._members.replicas) or 'none'}")
            if not replica.complete:
                raise MembershipError(f"replica {name} cannot be updated: rank {replica.missing_in_words} is not connected")
            if replica.refusal is not None:
                raise MembershipError(f"replica {name} cannot be updated: {replica.refusal}")
        if not names:
            raise MembershipError("every connected replica serves the newest version: there is nothing to update")
        return await self._seed(names, limit, late=replicas is None)

    async def _seed(self, names: Sequence[str], deadline: RoundDeadline, *, late: bool = False) -> RoundResult:
        async with self._serialize(deadline) as queued:  # a round that this one waited for may have updated who was late
            if self._pending_publications or (late and not (names := [name for name in self._late() if name in names])):
                raise Aborted("another round took precedence over seeding: `weightsync status` lists who is still late")
            targets = [self._members.replicas[name] for name in names if name in self._members.replicas]
            replicas = [replica for replica in targets if replica.complete and replica.refusal is None]
            version = self._seedable() or self._publications.require(self._members.trainers).version
            updated = [replica for replica in replicas if self._updates(replica, version) or replica.version == version]
            if replicas and not updated:
                raise StaleSource(f"only version {version} can be read, from the store: replicas that serve another one keep it")
            again = AgreedPublication(*version.order, deadline)
            self._seeding = self._spawn(self._run(again, updated, deadline, self.settings.grace, queued, seeding=True))
            try:
                return await self._seeding
            except asyncio.CancelledError:
                if (me := asyncio.current_task()) is not None and me.cancelling():
                    raise
                raise Aborted("a publication took precedence over seeding") from None
            finally:
                self._seeding = None

    def _late(self) -> list[str]:
        """Replicas that could be seeded and do not serve the version that can be read."""
        current = self._seedable()
        return [
            replica.name
            for replica in self._members.replicas.values()
            if replica.complete and replica.refusal is None and self._updates(replica, current)
        ]

    def _seed_wanted(self, names: Iterable[str] = ()) -> None:
        """Start background seeding if a replica needs it and a version can be read. ``names`` need it from now on, too.

        Each request gets one attempt; one that a publication cancelled, or failed on the store or without a trainer, is repeated.
        """
        self._wanted.update(names)
        if self._wanted and self._seedable() is not None and not self._closed and self._seeder is None:
            self._seeder = self._spawn(self._seed_in_background())

    async def _seed_in_background(self) -> None:
        try:
            while self._seedable() is not None and not self._pending_publications:  # a publication's end starts this again
                names = [name for name in self._late() if name in self._wanted]
                self._wanted.clear()
                if not names:
                    return
                try:
                    result = await self._seed(names, RoundDeadline(self.settings.timeout), late=True)
                    failed = (each for each in result.replicas if each.error)
                    alone = not self._members.trainers and self._keyed.allows_repetition
                    self._again.add(each.name for each in failed if each.source == STORE or alone)
                except Aborted:
                    self._wanted.update(names)  # a publication that updates them takes them out again; one that fails does not
                except WeightSyncError as error:
                    _log.warning("could not update %s: %s", ", ".join(names), readable(str(error)))
                    self._again.add(() if self._members.trainers else names)
        finally:
            self._seeder = None

    # Status, and closing.

    def status(self) -> Status:
        """Snapshot of the coordinator."""
        current = self._publications.current(self._members.trainers)
        replicas = tuple(replica_status(replica, self._publications) for _, replica in sorted(self._members.replicas.items()))
        gone = tuple(rank for _, rank in sorted(self._members.gone_trainers.items()))
        trainer = tuple(link.status() for _, link in sorted(self._members.trainers.items()))
        return Status(
            run=self.settings.run,
            last=self._publications.last,
            version=None if current is None else current.version,
            busy=self._lock.locked(),
            trainer_world_size=self._members.world_size,
            trainer=trainer,
            replicas=replicas,
            rounds=tuple(self.past.results),
            epoch=self._publications.epoch,
            now=time.time(),
            started=self._started,
            trainer_expected=self._members.trainer_expected,
            trainer_gone=gone,
            alerts=alerts_of(replicas, (*gone, *trainer), self.past),
            stored=None if self.stored.newest is None else self.stored.newest.version,
            adapters=self.loras.status(),
        )

    def routes(self) -> dict[str, tuple[str, Version | None]]:
        """For each URL of a replica its name, and the version for which it may get requests; ``None`` if it may get none."""
        replicas = sorted(self._members.replicas.values(), key=lambda replica: replica.routable)  # last: who came back wins
        return {other.url: (other.name, other.version if other.routable else None) for other in replicas if other.url}

    def gauges(self) -> Gauges:
        """Values for metrics."""
        return Gauges(
            run=self.settings.run, last=self._publications.last, busy=self._lock.locked(), queued=self._queued,
            trainer=tuple(self._members.trainers), epoch=self._publications.epoch, late=len(self._late()),
            missed=len(self.past.results[-1].missed) if self.past.results else 0,
            replicas=tuple(replica_gauges(replica, self._publications) for _, replica in sorted(self._members.replicas.items())),
            slowest=self.past.traces[-1].slowest_by_phase if self.past.traces else {},
            stored=-1 if self.stored.newest is None else self.stored.newest.version.number,
            relay_failing=any(link.failing for link in self._members.trainers.values()),
            adapters=self.loras.status(),
        )  # fmt: skip

    def _prepare_ahead(self, replica: Replica) -> None:
        """Prepare a replica for its next round now, unless a round runs or the replica will be seeded, which prepares it too."""
        if not self._lock.locked() and self._seedable() is None:
            self._preparing.start(replica)

    def subscribe(self) -> AsyncIterator[Event]:
        """Iterate over events from now on, see :class:`~weightsync.coordinator.events.Feed`."""
        return self._feed.subscribe()

    async def aclose(self) -> None:
        """Cancel running work, which quarantines replicas in the middle of an update, and end all subscriptions. Idempotent."""
        self._closed = True
        self._rendezvous.fail(Aborted("the coordinator is closing"))
        self.attendance.close()
        self.loras.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3 * self.settings.grace)
        self._feed.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Aborted("the coordinator is closed")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that is kept until it ends, and that :meth:`aclose` cancels. Its unexpected errors are logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if self._closed:
            task.cancel()

        def ended(done: asyncio.Task[Any]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and not isinstance(error := done.exception(), WeightSyncError | None):
                _log.error("%s ended by an unexpected error", getattr(work, "__qualname__", repr(work)), exc_info=error)

        task.add_done_callback(ended)
        return task
