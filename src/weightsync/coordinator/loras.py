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
from weightsync.coordinator.counts import PublishCounts
from weightsync.coordinator.keyed_digests import KeyedDigester
from weightsync.coordinator.lora_drops import drop
from weightsync.coordinator.lora_round import LoraRound, takes
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.publish_barrier import AgreedPublication, PublishBarrier
from weightsync.coordinator.rank_handle import RankHandle, RoundDeadline
from weightsync.coordinator.ranks import AdapterRank, EngineRank, RankNode
from weightsync.coordinator.replicas import Replica
from weightsync.coordinator.report import left_out
from weightsync.coordinator.round_context import RoundContext
from weightsync.coordinator.status import AdapterStatus
from weightsync.errors import ConfigurationError, MembershipError, ProtocolError, WeightSyncError, readable
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, adapter_label, check_adapter_name
from weightsync.protocol.lora_messages import HeldLora, LorasRefused, Retired, RetireLora
from weightsync.protocol.messages import Body, CannotPublish, Done, Publish, Published, RoundResult

_log = logging.getLogger(__name__)
_MOST_NAMES = 1 << 16
_REMEMBERED_SOURCES = 256  # without a connected rank


@dataclass(eq=False)
class _AdapterSource:
    """The ranks of a trainer that publish from the same regions."""

    members: Membership = field(default_factory=Membership)
    barriers: dict[str, PublishBarrier] = field(default_factory=dict)
    """By the adapter's name."""
    counts: PublishCounts = field(default_factory=PublishCounts)
    """Of publications under all names."""
    asked: dict[str, AdapterSpec] = field(default_factory=dict)
    """What each rank asked for last, by member."""


@dataclass(eq=False)
class _AdapterName:
    """What is known of an adapter's name."""

    publications: Publications = field(default_factory=Publications)
    source: str = ""
    """Whose regions hold the newest version, while they do."""
    spec: AdapterSpec | None = None
    """Of the newest version."""
    retired: int = -1
    """Versions up to this one are not served any more, except where a replica has less than ``keep`` newer ones."""
    keep: int = 0
    publishing: int = 0
    """Publications that run."""

    def surplus(self, held: Collection[int]) -> list[int]:
        """Those of the versions that a replica has which are retired there."""
        kept = sorted(held)[-self.keep :] if self.keep else ()
        return [number for number in held if number <= self.retired and number not in kept]


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
        self._names: dict[str, _AdapterName] = {}
        self._held: dict[str, dict[str, HeldLora]] = {}
        """By replica, then by label."""
        self._reported: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        """By replica: names and labels of all that its ranks reported when it was whole."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._delivering: asyncio.Task[None] | None = None
        self._lacking = set[str]()
        """Names of which replicas lack the newest version."""
        self._withdrawn = set[tuple[str, str]]()
        """Replicas and labels that a rank dropped by itself, perhaps before all ranks had registered them."""
        self.rounds = 0

    # Membership.

    def join(self, node: RankNode[AdapterRank]) -> RankHandle[Any]:
        """Add a rank that publishes adapters. Raises as :meth:`Membership.add_trainer` does."""
        ended = [name for name, source in self._sources.items() if not source.members.trainers]
        for name in ended[:-_REMEMBERED_SOURCES]:  # the ranks of the others may come back
            self._end_source(name)
        source = self._sources.setdefault(node.rank.hello.name, _AdapterSource())
        link = source.members.add_trainer(node)
        waiting = {member: asked for barrier in source.barriers.values() for member, asked in barrier.waiting.items()}
        source.counts.joined(link, source.members.trainers, waiting)
        return link

    def leave(self, node: RankNode[AdapterRank], reason: str, clean: bool) -> bool:
        """Remove a connection that has closed. Returns whether there was one: idempotent."""
        name = node.rank.hello.name
        source = self._sources.get(name)
        if source is None or not source.members.remove(node, reason, clean):
            return False
        for barrier in source.barriers.values():
            barrier.left(node.rank.member, reason, clean)
        if not source.members.trainers and not source.members.gone_trainers:
            self._end_source(name)
        return True

    def _end_source(self, name: str) -> None:
        for adapter in self._sources.pop(name).barriers:
            self._forget_unknown(adapter)

    def _forget_unknown(self, adapter: str) -> None:
        """Forget a name of which no version is known, unless a barrier or a round numbers versions by what is remembered here."""
        record, used = self._names.get(adapter), any(adapter in source.barriers for source in self._sources.values())
        if record is not None and not (used or record.publishing or record.publications.known):
            del self._names[adapter]

    def find(self, member: str) -> RankHandle[Any] | None:
        """Handle of a connected rank that publishes adapters."""
        return next((link for source in self._sources.values() if (link := source.members.trainers.get(member))), None)

    def revoke(self, link: RankHandle[Any]) -> None:
        """Refuse the credential of a rank that publishes adapters from now on."""
        self._sources[link.rank.hello.name].members.revoke(link)

    def replica_joined(self, replica: Replica) -> None:
        """All ranks of a replica are connected: learn what it serves, and bring it what it lacks."""
        reports = [link.loras for link in replica.links.values()]
        served: dict[str, HeldLora] = {}
        rest: defaultdict[str, list[int]] = defaultdict(list)
        for label, held in {label: held for report in reports for label, held in report.items()}.items():
            version = held.version
            if version.run not in self._names and len(self._names) >= _MOST_NAMES:
                continue
            record = self._record(version.run)
            record.publications.claim("engine", f"{replica.name} {label}", 1, version.number)
            self._reported[replica.name].append((version.run, label))
            other = record.publications.published.get(version.order, version) != version
            if not other and all(report.get(label) == held for report in reports):
                served[label] = held
            else:
                rest[version.run].append(version.number)
                why = "was published with another digest" if other else "not all of its ranks have"
                _log.warning("replica %s drops %s, which %s", replica.name, label, why)
        self._held[replica.name] = served
        self._drop(replica, rest)
        for name in {held.version.run for held in served.values()}:
            self._drop_surplus(replica, name)
        self.bring_missing()

    def refused(self, rank: EngineRank, body: LorasRefused) -> Done:
        """A rank has dropped versions by itself: its replica serves them no longer."""
        replica, numbers = self._members.replicas[rank.hello.name], defaultdict[str, list[int]](list)
        for version in body.versions:
            numbers[version.run].append(version.number)
            self._withdrawn.add((replica.name, adapter_label(version.run, version.number)))
        self._drop(replica, numbers)
        return Done()

    def _drop(self, replica: Replica, versions: Mapping[str, Sequence[int]]) -> None:
        """Let all ranks of a replica drop versions, by name, of which some have no part."""
        for name, numbers in versions.items():
            self._forget(replica, {adapter_label(name, number) for number in numbers})
            for link in replica.links.values():
                link.drops.put(name, numbers)

    def _numbers(self, replica: str, name: str) -> list[int]:
        """Versions of an adapter that a replica serves."""
        return [held.version.number for held in self._held.get(replica, {}).values() if held.version.run == name]

    def _drop_surplus(self, replica: Replica, name: str) -> None:
        if surplus := self._names[name].surplus(self._numbers(replica.name, name)):
            self._drop(replica, {name: surplus})

    def _forget(self, replica: Replica, labels: Collection[str]) -> None:
        """Record that no rank of a replica serves these versions any more."""
        for known in (self._held.get(replica.name, {}), *(link.loras for link in replica.links.values())):
            for label in known.keys() & set(labels):
                del known[label]

    def replica_left(self, replica: str) -> None:
        """A rank of a replica is gone."""
        self._withdrawn = {entry for entry in self._withdrawn if entry[0] != replica}
        self._held.pop(replica, None)
        for name, label in self._reported.pop(replica, ()):
            if (record := self._names.get(name)) is not None:
                record.publications.withdraw(f"{replica} {label}")
                self._forget_unknown(name)

    def base_updated(self) -> None:
        """A round of the base weights ended: adapters that its ranks refuse from now on are not served, others may be missing."""
        for replica in self._members.replicas.values():
            held = self._held.get(replica.name, {})
            self._forget(replica, [label for label, lora in held.items() if _refused(lora.spec, replica.version)])
        self.bring_missing()

    # Publishing.

    async def handle(self, member: str, body: Body, timeout: float) -> Body:
        """Answer a rank that publishes adapters."""
        limit = RoundDeadline(min(timeout, self._settings.timeout))
        if isinstance(body, Publish) and body.adapter is not None:
            return Published(await self._publish(member, body, body.adapter, limit))
        if isinstance(body, RetireLora):
            return await self._retire(body, limit)
        if isinstance(body, CannotPublish):
            why = readable(f"{body.kind}: {body.message}")
            self._barrier(member, body.adapter).cannot_publish(member, body.number, why, body.step, body.count)
            return Done()
        raise ProtocolError(f"{member} publishes adapters and may not send {type(body).__name__}")

    async def _publish(self, member: str, asked: Publish, spec: AdapterSpec, limit: RoundDeadline) -> RoundResult:
        self._sources[member.rpartition("/")[0]].asked[member] = spec
        return await self._barrier(member, spec.name).publish(member, asked, limit)

    def _barrier(self, member: str, adapter: str) -> PublishBarrier:
        check_adapter_name(adapter)
        name = member.rpartition("/")[0]
        source = self._sources[name]
        barrier = source.barriers.get(adapter)
        if barrier is None:
            record = self._record(adapter)
            start = partial(self._start, name)
            barrier = source.barriers[adapter] = PublishBarrier(
                source.members, record.publications, start, adapter=adapter, counts=source.counts
            )
        return barrier

    def _record(self, name: str) -> _AdapterName:
        if name not in self._names and len(self._names) >= _MOST_NAMES:
            raise ConfigurationError(f"this run knows {_MOST_NAMES:,} names of adapters already, so {name} cannot be added")
        return self._names.setdefault(name, _AdapterName())

    def _start(self, source: str, asked: AgreedPublication) -> asyncio.Task[RoundResult]:
        specs = [self._sources[source].asked[member] for member in asked.calls]
        return self._spawn(self._publish_agreed(source, specs, asked))

    async def _publish_agreed(self, source: str, specs: Sequence[AdapterSpec], asked: AgreedPublication) -> RoundResult:
        if any(spec != specs[0] for spec in specs):
            label = adapter_label(specs[0].name, asked.number)
            raise ConfigurationError(f"the trainer ranks that publish {label} differ in its configuration or its base")
        record = self._record(specs[0].name)
        record.publishing += 1
        try:
            result = await self._run(source, specs[0], asked, self._takers())
            if self._settings.retry:
                self.bring_missing([specs[0].name])
            return result
        finally:
            record.publishing -= 1
            self._forget_unknown(specs[0].name)

    def _takers(self) -> list[Replica]:
        """Replicas that take adapters."""
        return [
            replica for replica in self._members.taking_part() if any(link.rank.hello.lora_slots for link in replica.links.values())
        ]

    async def _run(
        self, source: str, spec: AdapterSpec, asked: AgreedPublication, replicas: Sequence[Replica], seeding: bool = False
    ) -> RoundResult:
        record, trainers = self._record(spec.name), self._sources[source].members.trainers_in_order()
        deadline, grace = asked.limits(self._settings.grace)
        if self._running.locked():  # a round of the base weights
            async with self._serialize(deadline):
                pass
        self.rounds += 1
        self._planner.keep_only({f"{name} {replica}" for name in self._sources for replica in self._members.replicas})
        if not seeding:
            for other in self._names.values():
                if other.source == source:  # its regions are about to be overwritten
                    other.publications.clear()
                    other.source = ""
        context = RoundContext(
            round=self.rounds, number=asked.number, epoch=asked.epoch, seeding=seeding, trainers=trainers, replicas=replicas,
            publications=record.publications, settings=structs.replace(self._settings, run=spec.name), deadline=deadline,
            grace=grace, emit=lambda event: None, exclude=lambda replica, why: None, pause_mode=self._settings.pause_mode,
            keyed=self._keyed, planner=self._planner, announced=partial(asyncio.sleep, 0), step=asked.step, calls=asked.calls,
            left_out=() if seeding else [left_out(replica) for replica in self._members.left_out() if replica.name in self._held],
        )  # fmt: skip
        self._withdrawn -= {(replica.name, adapter_label(spec.name, asked.number)) for replica in replicas}
        turns = {replica.name: self._turns[replica.name] for replica in replicas}
        result = await LoraRound(context, spec, source, turns, self._registered).run()
        if not seeding:
            record.source, record.spec = source, spec
            self._drop_others(result.version)
        return result

    def _drop_others(self, published: Version) -> None:
        """Let replicas drop what they have brought from an earlier coordinator under the label of this version."""
        label = adapter_label(published.run, published.number)
        for name, held in self._held.items():
            if label in held and held[label].version != published:
                _log.warning("replica %s drops %s, which was published with another digest since it joined", name, label)
                self._drop(self._members.replicas[name], {published.run: [published.number]})

    def _registered(self, replica: Replica, version: Version, spec: AdapterSpec) -> None:
        label = adapter_label(version.run, version.number)
        if not _refused(spec, replica.version) and (replica.name, label) not in self._withdrawn:
            for known in (self._held.setdefault(replica.name, {}), *(link.loras for link in replica.links.values())):
                known[label] = HeldLora(version, spec)
            self._drop_surplus(replica, version.run)  # what was retired and kept for lack of this one; or this one

    async def _retire(self, body: RetireLora, limit: RoundDeadline) -> Retired:
        check_adapter_name(body.name)
        record = self._names.get(body.name)
        if record is None:
            raise MembershipError(f"no version of {body.name} was published in this run")
        held = {replica: numbers for replica in self._held if (numbers := self._numbers(replica, body.name))}
        known = {number for numbers in held.values() for number in numbers}
        if record.source:
            known.add(record.publications.own[1])  # which late replicas get
        retired = sorted(known)[: len(known) - body.keep] if body.keep else known
        if not retired:
            return Retired(())
        record.retired, record.keep = max(record.retired, *retired), body.keep
        if record.publications.last <= record.retired:
            record.publications.clear()  # what its source still holds is not delivered any more
            record.source, record.spec = "", None
        surplus = {self._members.replicas[replica]: record.surplus(numbers) for replica, numbers in held.items()}
        dropping = {replica: numbers for replica, numbers in surplus.items() if numbers}
        for replica, numbers in dropping.items():
            self._forget(replica, {adapter_label(body.name, number) for number in numbers})
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
        self._lacking.update(name for name in (self._names if names is None else names) if self._missing(name))
        if self._lacking and self._delivering is None:
            self._delivering = self._spawn(self._bring_missing())

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
            if replica.complete and label not in self._held.get(replica.name, {}) and takes(replica, spec, late=True)
        ]

    async def _bring_missing(self) -> None:
        try:
            while self._lacking:
                await self._bring(self._lacking.pop())
        finally:
            self._delivering = None

    async def _bring(self, name: str) -> None:
        record, replicas = self._names[name], self._missing(name)
        if not replicas or record.spec is None:
            return
        again = AgreedPublication(*record.publications.own, RoundDeadline(self._settings.timeout))
        try:
            result = await self._run(record.source, record.spec, again, replicas, seeding=True)
            for missed in result.missed:
                _log.warning("%s could not be brought to replica %s: %s", result.version, missed.name, missed.error)
        except WeightSyncError as error:
            _log.warning("the newest version of %s could not be brought to late replicas: %s", name, readable(str(error)))

    # Status, and closing.

    def status(self) -> tuple[AdapterStatus, ...]:
        """What is served, by name and number."""
        loras = {label: lora for held in self._held.values() for label, lora in held.items()}
        return tuple(
            AdapterStatus(
                name=lora.version.run, version=lora.version.number, digest=lora.version.digest, rank=lora.spec.config.rank,
                base=None if lora.spec.base is None else str(lora.spec.base),
                replicas=tuple(sorted(replica for replica, held in self._held.items() if label in held)),
            )
            for label, lora in sorted(loras.items(), key=lambda item: (item[1].version.run, item[1].version.number))
        )  # fmt: skip

    def close(self) -> None:
        """Fail pending publications."""
        for source in self._sources.values():
            for barrier in source.barriers.values():
                barrier.close()


def _refused(spec: AdapterSpec, base: Version | None) -> bool:
    """Whether an engine with these base weights refuses the adapter."""
    return spec.on_base_update == "refuse" and base is not None and spec.base != base
