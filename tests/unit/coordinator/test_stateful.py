"""Holds the invariants of the design under random joins, crashes, reconnects, restarts, publications and faults at every step.

The fake engines know which bytes they hold and sound the alarm themselves; after every step, and in the middle of rounds, what
the coordinator says of each replica is compared with what its ranks really hold. So it is with all replicas at once and rolling
(``max_unavailable``), and for each way to say which replicas a round requires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import VirtualTimeLoop

from weightsync.config import Require, RoundSettings
from weightsync.coordinator import Coordinator
from weightsync.coordinator.events import Event, ReplicaPhase, RoundEnded, RoundStarted
from weightsync.errors import MembershipError, WeightSyncError
from weightsync.protocol.messages import Publish

NAMES = ("a", "b", "c")
RANKS = {"a": 1, "b": 2, "c": 2}
DELIVERIES = {"a": "auto", "b": "auto", "c": "streamed"}
TRAINERS = 2
PHASES = ("prepare", "pause", "move", "commit", "resume", "quarantine")
KINDS = ("fail", "crash", "hang", "stubborn", "lost", "vanish", "partial", "corrupt", "zero", "undigested", "late", "other")

members = st.sampled_from([(name, rank) for name in NAMES for rank in range(RANKS[name])])
faults = st.dictionaries(st.tuples(members, st.sampled_from(PHASES)), st.sampled_from(KINDS), max_size=3)
trainer_faults = st.one_of(st.just(""), st.just(""), st.sampled_from(["fail", "hang", "stubborn", "lost", "vanish", "short"]))
moments = st.integers(0, 12).map(lambda step: step * 0.007)


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.runner.get_loop()
        self.number = 0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    def teardown(self) -> None:
        async def end() -> None:
            await self.world.coordinator.aclose()
            await asyncio.sleep(7200)

        try:
            if hasattr(self, "world"):
                self.run(end())
                assert not self.world.alarms, self.world.alarms
        finally:
            self.runner.close()

    @initialize(max_unavailable=st.sampled_from([None, 1, 2]), require=st.sampled_from(["all", "any", 0, 2]))
    def start(self, max_unavailable: int | None, require: Require) -> None:
        async def begin() -> None:
            rules = RoundSettings(run="test", grace=GRACE, timeout=600.0, max_unavailable=max_unavailable, require=require)
            self.world = World(rules)
            self.watch(self.world.coordinator)
            self.world.add_trainers(TRAINERS)
            self.world.add_replica("a", RANKS["a"])
            self.world.add_replica("b", RANKS["b"])

        self.run(begin())

    def watch(self, coordinator: Coordinator) -> None:
        """At every event: is more out of service than may be, and does a result keep to what is required?"""
        emit, rules, world = coordinator._feed.emit, coordinator.settings, self.world
        served: set[str] = set()

        def watching(event: Event) -> None:
            states = {replica.name: replica.state for replica in coordinator.status().replicas}
            match event:
                case RoundStarted():
                    served.clear()
                    served.update(name for name, state in states.items() if state == "loaded")
                case ReplicaPhase(phase="pause") if rules.max_unavailable is not None:
                    out = [name for name in served if states[name] == "updating"]
                    if len(out) > rules.max_unavailable:
                        world.alarm(f"{out} are out of service at a time, and {rules.max_unavailable} may be")
                case RoundEnded(result=result) if result is not None:
                    good, every = sum(one.error is None for one in result.replicas), len(result.replicas)
                    enough = {"all": 0 < every == good, "any": good > 0}.get(str(rules.require))
                    enough = good >= int(rules.require) if enough is None else enough
                    if result.ok != enough:
                        world.alarm(f"{good} of {every} replicas are taken for ok={result.ok} where {rules.require} must be")
            emit(event)

        coordinator._feed.emit = watching  # type: ignore[method-assign]

    # Things that happen to ranks; also in the middle of rounds.

    def engine_joins(self, name: str, rank: int) -> None:
        """A new process, if the place is free; refused if not."""
        held = self.world.engines.get(f"{name}/{rank}")
        try:
            self.world.add_engine(name, rank, RANKS[name], DELIVERIES[name])  # type: ignore[arg-type]
        except MembershipError:
            assert held is not None
            assert held.connected
        else:
            assert held is None or not held.connected

    def engine_crashes(self, name: str, rank: int) -> None:
        process = self.world.engines.get(f"{name}/{rank}")
        if process is not None:
            process.disconnect()

    def engine_blinks(self, name: str, rank: int) -> None:
        """The same process connects again, whether or not anybody noticed that its connection was gone."""
        process = self.world.engines.get(f"{name}/{rank}")
        if process is not None:
            old = process.node
            process.connect()
            self.world.coordinator.leave(old)

    def trainer_crashes(self, name: str, rank: int) -> None:
        process = self.world.trainers.get(f"trainer/{rank}")
        if process is not None:
            process.disconnect()

    def trainer_joins(self, name: str, rank: int) -> None:
        if f"trainer/{rank}" not in self.world.trainers:
            self.world.add_trainer(rank, TRAINERS)

    def coordinator_dies(self, name: str, rank: int) -> None:
        """Without a word: every connection breaks, and everybody connects to a new one."""
        world = self.world
        old, world.coordinator = world.coordinator, World(world.settings).coordinator
        self.watch(world.coordinator)
        for process in (*world.engines.values(), *world.trainers.values()):
            if process.connected:
                old.leave(process.node, "the coordinator died")
        self.dying = asyncio.ensure_future(old.aclose())
        for engine in world.engines.values():
            if engine.connected:
                engine.connect()
        for trainer in world.trainers.values():
            trainer.connect()

    def nothing(self, name: str, rank: int) -> None:
        """Happens, too."""

    events = st.sampled_from(
        [engine_joins, engine_crashes, engine_blinks, trainer_crashes, trainer_joins, coordinator_dies, nothing]
    )

    @rule(event=events, member=members)
    def happens(self, event: Callable[[Protocol, str, int], None], member: tuple[str, int]) -> None:
        async def it() -> None:
            event(self, *member)
            await asyncio.sleep(0.5)

        self.run(it())

    # Rounds.

    async def faulty(self, work: Coroutine[Any, Any, Any], event: Any, member: tuple[str, int], moment: float) -> None:
        started = asyncio.get_running_loop().time()
        asking = asyncio.ensure_future(work)
        await asyncio.sleep(moment)
        self.look()
        event(self, *member)
        self.look()
        try:
            await asking
        except (WeightSyncError, AssertionError) as error:
            if isinstance(error, AssertionError):
                raise
        assert asyncio.get_running_loop().time() - started <= 60.0 + GRACE + 1e-6, "past the deadline"
        self.world.faults.clear()
        await asyncio.sleep(3 * GRACE)

    @rule(faults=faults, bad_trainer=trainer_faults, event=events, member=members, moment=moments)
    def publish(self, faults: Any, bad_trainer: str, event: Any, member: tuple[str, int], moment: float) -> None:
        async def it() -> None:
            self.number += 1
            self.world.faults.update({(f"{name}/{rank}", phase): kind for ((name, rank), phase), kind in faults.items()})
            if bad_trainer:
                self.world.faults["trainer/1", "place"] = bad_trainer
            await self.faulty(self.world.publish(self.number), event, member, moment)

        self.run(it())

    @rule(faults=faults, event=events, member=members, moment=moments)
    def seed(self, faults: Any, event: Any, member: tuple[str, int], moment: float) -> None:
        async def it() -> None:
            self.world.faults.update({(f"{name}/{rank}", phase): kind for ((name, rank), phase), kind in faults.items()})
            await self.faulty(self.world.coordinator.seed(timeout=60.0), event, member, moment)

        self.run(it())

    @rule(faults=faults, moment=moments, whole=st.booleans())
    def publisher_cancelled(self, faults: Any, moment: float, whole: bool) -> None:
        """A trainer rank gives up waiting; with ``whole``, all do, and publish the next version at once."""

        async def it() -> None:
            self.number += 1
            self.world.faults.update({(f"{name}/{rank}", phase): kind for ((name, rank), phase), kind in faults.items()})
            ranks = list(self.world.trainers)
            asking = [asyncio.ensure_future(self.world.coordinator.publish(rank, Publish(self.number), 60.0)) for rank in ranks]
            await asyncio.sleep(moment)
            for task in asking if whole else asking[:1]:
                task.cancel()
            if whole and ranks:
                self.number += 1
                asking += [
                    asyncio.ensure_future(self.world.coordinator.publish(rank, Publish(self.number), 60.0)) for rank in ranks
                ]
            await asyncio.gather(*asking, return_exceptions=True)
            self.world.faults.clear()
            await asyncio.sleep(70.0)

        self.run(it())

    @precondition(lambda self: self.number > 0)
    @rule()
    def everything_is_well_again(self) -> None:
        """Whatever happened before: with all ranks there and no faults, the next publication reaches everybody."""

        async def it() -> None:
            await asyncio.sleep(3700.0)
            for rank in range(TRAINERS):
                self.trainer_joins("", rank)
            for process in self.world.engines.values():
                if not process.connected:
                    self.engine_joins(process.name, int(process.member[-1]))
            await asyncio.sleep(1.0)
            self.number += 1
            result = await self.world.publish(self.number)
            for name, state in self.world.states().items():
                if all(f"{name}/{rank}" in self.world.engines for rank in range(RANKS[name])):
                    assert state == ("loaded", self.number), (name, state, result)

        self.run(it())

    def look(self) -> None:
        assert not self.world.alarms, self.world.alarms
        wrong = [line for line in self.world.problems() if "is dirty" not in line]  # its quarantine may be under way
        assert not wrong, wrong

    @invariant()
    def nothing_torn_nothing_mislabelled(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than the time limit of a test
)
