"""LoRA adapters of one run: who publishes them, which replicas serve which versions, and the rounds that bring them there.

Versions of a name are numbered as those of the base weights are, by the same barrier. Which versions a replica serves is known from
rounds and, after a restart of the coordinator, from what all ranks of the replica report: what only some of them report is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from weightsync.config import RoundSettings
from weightsync.coordinator.adapter_names import AdapterName, AdapterNames
from weightsync.coordinator.counts import PublishCounts
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.lora_round import LoraRound, ReplicaTurn, takes
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publish_barrier import AgreedPublication, PublishBarrier
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline, drop
from weightsync.coordinator.ranks import AdapterRank, EngineRank, RankNode
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import left_out
from weightsync.coordinator.round_context import RoundContext
from weightsync.coordinator.status import AdapterStatus
from weightsync.errors import Aborted, ConfigurationError, MembershipError, PeerLost, ProtocolError, WeightSyncError, readable
from weightsync.model import FIRST_EPOCH, Version
from weightsync.model.lora import AdapterSpec, adapter_label, check_adapter_name
from weightsync.protocol.lora_messages import HeldLora, LorasRefused, Retired, RetireLora
from weightsync.protocol.messages import Body, CannotPublish, Done, Publish, Published, RoundResult

_log = logging.getLogger(__name__)
_DELIVERIES = 64  # to late replicas, at the same time
_REMEMBERED_SOURCES = 256  # without a connected rank


@dataclass(eq=False)
class _AdapterSource:
    """The ranks of a trainer that publish from the same regions."""

    members: Membership
    barriers: dict[str, PublishBarrier] = field(default_factory=dict)
    """By the adapter's name."""
    counts: PublishCounts = field(default_factory=PublishCounts)
    """Of publications under all names."""
    asked: dict[str, AdapterSpec] = field(default_factory=dict)
    """What each rank asked for last, by member."""


class Loras:
    """Control side of the adapters of one run.

    ``members`` has the replicas. ``rounds`` are the lock of the base weights' rounds and what waits for it. ``spawn`` starts a task
    that the coordinator keeps.
    """

    def __init__(
        self,
        settings: RoundSettings,
        members: Membership,
        keyed: KeyedDigester,
        rounds: tuple[asyncio.Lock, Callable[[RoundDeadline], AbstractAsyncContextManager[float]]],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._settings, self._members, self._keyed = settings, members, keyed
        (self._running, self._serialize), self._spawn = rounds, spawn
        self._planner = Planner(settings.plan_bytes)
        self._sources: dict[str, _AdapterSource] = {}
        self._names = AdapterNames()
        self._reported: dict[str, dict[str, int]] = {}
        """By replica, then by name: the highest number that its ranks reported when it was whole."""
        self._turns: defaultdict[str, ReplicaTurn] = defaultdict(ReplicaTurn)
        self._lacking: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        """By tenant and replica: names of which it lacks the newest version. It gets them one by one."""
        self._places = asyncio.Semaphore(_DELIVERIES)
        self._withdrawn = set[tuple[str, str]]()
        """Replicas and labels that a rank dropped by itself, perhaps before all ranks had registered them."""
        self.rounds = 0

    # Membership.

    def join(self, node: RankNode[AdapterRank]) -> RankHandle[Any]:
        """Add a rank that publishes adapters. Raises as :meth:`Membership.add_trainer` does."""
        ended = [name for name, source in self._sources.items() if not source.members.trainers]
        for name in ended[:-_REMEMBERED_SOURCES]:  # the ranks of the others may come back
            self._end_source(name)
        source = self._sources.setdefault(node.rank.hello.name, _AdapterSource(Membership(self._members)))
        try:
            link = source.members.add_trainer(node)
        except WeightSyncError:
            for barrier in source.barriers.values():
                barrier.proceed()
            raise
        waiting = {member: asked for barrier in source.barriers.values() for member, asked in barrier.waiting.items()}
        source.counts.joined(link, source.members.trainers, waiting)
        return link

    def leave(self, node: RankNode[AdapterRank], reason: str, clean: bool) -> bool:
        """Remove a connection that has closed. Returns whether there was one: idempotent."""
        name = node.rank.hello.name
        source = self._sources.get(name)
        if source is None or not source.members.remove(node, reason, clean):
            return False
        for adapter, barrier in list(source.barriers.items()):
            barrier.left(node.rank.member, reason, clean)
            self._forget_unused(adapter)
        if not source.members.trainers and not source.members.gone_trainers:
            self._end_source(name)
        return True

    def _end_source(self, name: str) -> None:
        for adapter in self._sources.pop(name).barriers:
            if self._names[adapter].source == name:
                self._names[adapter].overwritten()
            self._forget_unused(adapter)

    def _forget_unused(self, name: str) -> None:
        """Keep only the last number of a name that is not used any more.

        The barrier of several ranks remembers a failure for those that come back later. If nothing was ever published, that is all
        that there is, so it stays as long as the ranks.
        """
        record = self._names.get(name)
        if record is None or not record.over or any(self._numbers(replica, name) for replica in self._members.replicas.values()):
            return
        sources = [source for source in self._sources.values() if name in source.barriers]
        if all(each.barriers[name].idle and (record.retired >= 0 or each.members.world_size <= 1) for each in sources):
            for source in sources:
                del source.barriers[name]
            self._names.forget(name)

    def find(self, member: str) -> RankHandle[Any] | None:
        """Handle of a connected rank that publishes adapters."""
        return next((link for source in self._sources.values() if (link := source.members.trainers.get(member))), None)

    def replica_joined(self, replica: Replica) -> None:
        """All ranks of a replica are connected: learn what it serves, and bring it what it lacks."""
        reports, hellos = [link.loras for link in replica.links.values()], [link.rank.hello for link in replica.links.values()]
        others = [held_by(other) for other in self._members.replicas.values() if other is not replica]
        self._withdraw(replica.name)
        rest: defaultdict[str, list[int]] = defaultdict(list)
        for label, held in {label: held for report in reports for label, held in report.items()}.items():
            version = held.version
            published = self._record(version.run, None).publications.published.get(version.order, version)
            served_here = (known[label].version for known in others if label in known)
            other = any(known != version for known in (published, *served_here))
            if other or any(report.get(label) != held for report in reports):
                rest[version.run].append(version.number)
                why = "others serve, or were sent, with another digest" if other else "not all of its ranks have"
                _log.warning("replica %s drops %s, which %s", replica.name, label, why)
        held_here = [(held.version.run, held.version.number) for report in reports for held in report.values()]
        reported = self._reported[replica.name] = dict(held_here)
        for name, number in (*held_here, *(taken for hello in hellos for taken in hello.taken_loras.items())):
            reported[name] = max(number, reported.get(name, -1))
        for name in reported.keys() & self._names.keys():
            self._claim(replica.name, name)
        self._drop(replica, rest)
        for name in rest:
            self._forget_unused(name)
        for name in {held.version.run for held in held_by(replica).values()}:
            self._drop_surplus(replica, name)
        self.bring_missing()

    def refused(self, rank: EngineRank, body: LorasRefused) -> None:
        """A rank has dropped versions by itself: its replica serves them no longer."""
        replica, numbers = self._members.replicas[rank.hello.name], defaultdict[str, list[int]](list)
        for version in body.versions:
            numbers[version.run].append(version.number)
            self._withdrawn.add((replica.name, adapter_label(version.run, version.number)))
        self._drop(replica, numbers)

    def _drop(self, replica: Replica, versions: Mapping[str, Sequence[int]]) -> None:
        """Let all ranks of a replica drop versions, by name, of which some have no part."""
        for name, numbers in versions.items():
            self._forget(replica, {adapter_label(name, number) for number in numbers})
            for link in replica.links.values():
                link.drops.put(name, numbers)

    def _numbers(self, replica: Replica, name: str) -> list[int]:
        """Versions of an adapter that a replica serves."""
        return [held.version.number for held in held_by(replica).values() if held.version.run == name]

    def _drop_surplus(self, replica: Replica, name: str) -> None:
        if surplus := self._names[name].surplus(self._numbers(replica, name)):
            self._drop(replica, {name: surplus})

    def _forget(self, replica: Replica, labels: Collection[str]) -> None:
        """Record that no rank of a replica serves these versions any more."""
        for link in replica.links.values():
            for label in link.loras.keys() & set(labels):
                del link.loras[label]

    def replica_left(self, replica: str) -> None:
        """A rank of a replica is gone."""
        self._withdrawn = {entry for entry in self._withdrawn if entry[0] != replica}
        self._turns.pop(replica, None)
        self._withdraw(replica)

    def _withdraw(self, replica: str) -> None:
        """Let what a replica reported count no longer."""
        for name in self._reported.pop(replica, {}).keys() & self._names.keys():
            self._names[name].publications.withdraw(replica)
            self._forget_unused(name)

    def base_updated(self) -> None:
        """A round of the base weights ended: adapters that its ranks refuse from now on are not served, others may be missing."""
        for replica in self._members.replicas.values():
            self._forget(replica, [label for label, lora in held_by(replica).items() if _refused(lora.spec, replica.version)])
        self.bring_missing()

    # Publishing.

    async def handle(self, member: str, body: Body, timeout: float) -> Body:
        """Answer a rank that publishes adapters."""
        limit = RoundDeadline(min(timeout, self._settings.timeout))
        if isinstance(body, Publish) and body.adapter is not None:
            self._sources[member.rpartition("/")[0]].asked[member] = body.adapter
            try:
                return Published(await self._barrier(member, body.adapter.name).publish(member, body, limit))
            finally:
                self._forget_unused(body.adapter.name)
        if isinstance(body, RetireLora):
            return await self._retire(body, limit)
        if isinstance(body, CannotPublish):
            why = readable(f"{body.kind}: {body.message}")
            self._barrier(member, body.adapter).cannot_publish(member, body.number, why, body.step, body.count)
            self._forget_unused(body.adapter)
            return Done()
        raise ProtocolError(f"{member} publishes adapters and may not send {type(body).__name__}")

    def _barrier(self, member: str, adapter: str) -> PublishBarrier:
        check_adapter_name(adapter)
        name = member.rpartition("/")[0]
        source = self._sources[name]
        barrier = source.barriers.get(adapter)
        if barrier is None:
            link: RankHandle[Any] = source.members.trainers[member]
            record = self._record(adapter, link.rank.limits)
            start = partial(self._start, name)
            barrier = source.barriers[adapter] = PublishBarrier(
                source.members, record.publications, start, adapter=adapter, counts=source.counts,
                check=partial(self._check_name, source, adapter),
            )  # fmt: skip
        return barrier

    def _check_name(self, source: _AdapterSource, adapter: str, member: str) -> None:
        """Fail at once if other ranks of a source wait for this one under another name."""
        for name, barrier in source.barriers.items():
            if name != adapter and (others := barrier.waiting.keys() - {member}):
                error = ConfigurationError(
                    f"trainer ranks differ: {member} publishes {adapter}, {', '.join(sorted(others))} {name}. All ranks publish "
                    "parts or copies of the same adapter; one that a rank publishes alone is Adapters(..., rank=0, world_size=1)"
                )
                barrier.fail(error, member)
                raise error

    def _record(self, name: str, limits: str | None) -> AdapterName:
        if name not in self._names:
            self._names.add(name, limits)
            for replica in self._reported:
                self._claim(replica, name)
        return self._names[name]

    def _claim(self, replica: str, name: str) -> None:
        """Use no number again that a replica took through an earlier coordinator, for as long as it is connected.

        Unlike that of a base version, its claim counts beside those of trainers: who runs an engine may publish adapters, too.
        """
        self._names[name].publications.claim("trainer", replica, FIRST_EPOCH, self._reported[replica].get(name, -1))

    def _start(self, source: str, asked: AgreedPublication) -> asyncio.Task[RoundResult]:
        specs = [self._sources[source].asked[member] for member in asked.calls]
        return self._spawn(self._publish_agreed(source, specs, asked))

    async def _publish_agreed(self, source: str, specs: Sequence[AdapterSpec], asked: AgreedPublication) -> RoundResult:
        if any(spec != specs[0] for spec in specs):
            label = adapter_label(specs[0].name, asked.number)
            raise ConfigurationError(f"the trainer ranks that publish {label} differ in its configuration or its base")
        try:
            result = await self._run(source, specs[0], asked, self._takers())
            if self._settings.retry:
                self.bring_missing([specs[0].name])
            return result
        finally:
            self._names[specs[0].name].publications.reserved.discard((asked.epoch, asked.number))
            self._forget_unused(specs[0].name)

    def _tenant(self, source: str) -> str:
        """Whose publications wait for each other: of a limited token those of all sources, of the whole one those of each."""
        links: Iterable[RankHandle[Any]] = self._sources[source].members.trainers.values()
        return next((link.rank.limits for link in links), "") or source

    def _takers(self) -> list[Replica]:
        """Replicas that take adapters."""
        return [
            replica for replica in self._members.taking_part() if any(link.rank.hello.lora_slots for link in replica.links.values())
        ]

    async def _run(
        self, source: str, spec: AdapterSpec, asked: AgreedPublication, replicas: Sequence[Replica], seeding: bool = False
    ) -> RoundResult:
        if source not in self._sources:
            raise PeerLost(f"the ranks that publish {spec.name} have left")
        record, trainers = self._names[spec.name], self._sources[source].members.trainers_in_order()
        (deadline, grace), tenant = asked.limits(self._settings.grace), self._tenant(source)
        if self._running.locked():  # a round of the base weights
            async with self._serialize(deadline):
                pass
        self.rounds += 1
        self._planner.keep_only({f"{name} {replica}" for name in self._sources for replica in self._members.replicas})
        context = RoundContext(
            round=self.rounds, number=asked.number, epoch=asked.epoch, seeding=seeding, trainers=trainers, replicas=replicas,
            publications=record.publications, settings=structs.replace(self._settings, run=spec.name), deadline=deadline,
            grace=grace, emit=lambda event: None, exclude=lambda replica, why: None, pause_mode=self._settings.pause_mode,
            keyed=self._keyed, planner=self._planner, announced=partial(asyncio.sleep, 0), step=asked.step, calls=asked.calls,
            left_out=() if seeding else [left_out(replica) for replica in self._members.left_out() if replica.complete],
        )  # fmt: skip
        self._withdrawn -= {(replica.name, adapter_label(spec.name, asked.number)) for replica in replicas}
        turns = {replica.name: self._turns[replica.name] for replica in replicas}
        result = await LoraRound(context, spec, source, tenant, turns, self._registered, partial(self._overwritten, source)).run()
        if not seeding:
            # An older publication may end last: a replica hung, and its caller gave up.
            if source in self._sources and result.version.order == record.publications.own:
                record.source, record.spec = source, spec
            self._drop_others(result.version)
        return result

    def _overwritten(self, source: str) -> None:
        """Note that the memory from which versions of ``source`` could be brought is about to hold another one."""
        for name, other in list(self._names.items()):
            if other.source == source:
                other.overwritten()
                self._forget_unused(name)

    def _drop_others(self, published: Version) -> None:
        """Let replicas drop what they have brought from an earlier coordinator under the label of this version."""
        label = adapter_label(published.run, published.number)
        for name, replica in self._members.replicas.items():
            if (held := held_by(replica).get(label)) is not None and held.version != published:
                _log.warning("replica %s drops %s, which was published with another digest since it joined", name, label)
                self._drop(replica, {published.run: [published.number]})

    def _registered(self, replica: Replica, version: Version, spec: AdapterSpec) -> None:
        label = adapter_label(version.run, version.number)
        if not _refused(spec, replica.version) and (replica.name, label) not in self._withdrawn:
            for link in replica.links.values():
                link.loras[label] = HeldLora(version, spec)
            self._drop_surplus(replica, version.run)  # what was retired and kept for lack of this one; or this one

    async def _retire(self, body: RetireLora, limit: RoundDeadline) -> Retired:
        check_adapter_name(body.name)
        record = self._names.get(body.name)
        if record is None and self._names.was_retired(body.name):
            return Retired(())
        if record is None:
            raise MembershipError(f"no version of {body.name} was published in this run")
        held = {replica: numbers for replica in self._members.replicas.values() if (numbers := self._numbers(replica, body.name))}
        known = {number for numbers in held.values() for number in numbers}
        if record.publications.own[1] >= 0 and (record.source or not body.keep):
            known.add(record.publications.own[1])  # which late replicas get, or what one that is away may bring
        if not record.retire(known, body.keep):
            return Retired(())
        surplus = {replica: record.surplus(numbers) for replica, numbers in held.items()}
        dropping = {replica: numbers for replica, numbers in surplus.items() if numbers}
        for replica, numbers in dropping.items():
            self._forget(replica, {adapter_label(body.name, number) for number in numbers})
        self._forget_unused(body.name)
        seconds = min(self._settings.grace, limit.left)
        drops = (drop(replica.members(), body.name, numbers, seconds) for replica, numbers in dropping.items())
        errors = await asyncio.gather(*drops)
        dropped = sorted({number for numbers in dropping.values() for number in numbers})
        return Retired(tuple(dropped), tuple(readable(error) for several in errors for error in several))

    # Late replicas.

    def bring_missing(self, names: Iterable[str] | None = None) -> None:
        """Bring the newest version of names whose source still holds it to replicas that lack it, once, in the background.

        By default of all names.
        """
        for name in self._names if names is None else names:
            for replica in self._missing(name):
                tenant = self._tenant(self._names[name].source)
                if (tenant, replica.name) not in self._lacking:
                    self._spawn(self._bring_missing(tenant, replica.name))
                self._lacking[tenant, replica.name].add(name)

    def _missing(self, name: str) -> list[Replica]:
        record = self._names[name]
        source = self._sources.get(record.source)
        placement = None if source is None else record.publications.current(source.members.trainers)
        if placement is None or record.spec is None or placement.version.number <= record.retired:
            return []
        label, spec = adapter_label(name, placement.version.number), record.spec
        return [
            replica
            for replica in self._takers()
            if replica.complete and label not in held_by(replica) and takes(replica, spec, late=True)
        ]

    async def _bring_missing(self, tenant: str, replica: str) -> None:
        try:
            while names := self._lacking[tenant, replica]:
                async with self._places:
                    await self._bring(names.pop(), replica)
        finally:
            del self._lacking[tenant, replica]

    async def _bring(self, name: str, replica: str) -> None:
        record = self._names.get(name)
        replicas = [] if record is None else [lacking for lacking in self._missing(name) if lacking.name == replica]
        if record is None or record.spec is None or not replicas:
            return
        record.delivering += 1
        again = AgreedPublication(*record.publications.own, RoundDeadline(self._settings.timeout))
        try:
            result = await self._run(record.source, record.spec, again, replicas, seeding=True)
            for missed in result.missed:
                _log.warning("%s could not be brought to replica %s: %s", result.version, missed.name, missed.error)
        except WeightSyncError as error:
            _log.warning("the newest version of %s could not be brought to replica %s: %s", name, replica, readable(str(error)))
        finally:
            record.delivering -= 1
            self._forget_unused(name)

    # Status, and closing.

    def status(self) -> tuple[AdapterStatus, ...]:
        """What is served, by name and number."""
        served = {name: held_by(replica) for name, replica in self._members.replicas.items()}
        loras = {label: lora for held in served.values() for label, lora in held.items()}
        connected = {name for name, source in self._sources.items() if source.members.trainers}
        return tuple(
            AdapterStatus(
                name=lora.version.run, version=lora.version.number, digest=lora.version.digest, rank=lora.spec.config.rank,
                base=None if lora.spec.base is None else str(lora.spec.base),
                replicas=tuple(sorted(replica for replica, held in served.items() if label in held)),
                published=lora.version.run in self._names and self._names[lora.version.run].source in connected,
            )
            for label, lora in sorted(loras.items(), key=lambda item: (item[1].version.run, item[1].version.number))
        )  # fmt: skip

    def close(self) -> None:
        """Fail pending publications."""
        for source in self._sources.values():
            for barrier in source.barriers.values():
                barrier.fail(Aborted("the coordinator is closing"))


def held_by(replica: Replica) -> dict[str, HeldLora]:
    """Versions that a replica serves, by label. All its ranks have the same: from what they report, the rest is dropped."""
    return next(iter(replica.links.values())).loras if replica.complete else {}


def _refused(spec: AdapterSpec, base: Version | None) -> bool:
    """Whether an engine with these base weights refuses the adapter."""
    return spec.on_base_update == "refuse" and base is not None and spec.base != base
