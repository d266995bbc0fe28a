"""``python -m tests.simulation --fleet 4096``: a rolling round of thousands of engine ranks, of whose hosts some fail meanwhile.

The control layer is real, as in every schedule: coordinator, sockets' ends, messages as bytes, links and roles of all ranks.
What differs is that reads take seconds, as those of large models do, and that most looks are at one replica.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from dataclasses import dataclass
from typing import Any

from tests.simulation import coordination
from tests.simulation.clock import run
from tests.simulation.installation import installed, replaced
from tests.simulation.ranks import EngineProcess, Process, TrainerProcess
from tests.simulation.world import World

from weightsync.protocol.messages import RoundResult

__all__ = ["FleetOutcome", "run_fleet"]

_HOST_RANKS = 8  # a host is a replica
_TRAINERS = 2
_READ_SECONDS = (1.0, 2.0)
_REBOOT_SECONDS = 45.0
_LONGEST = 600.0  # of a round
_JOIN_SECONDS = 60.0
_FAILING_SECONDS = 20.0  # after the publication, in which hosts fail
_LOOK_EVERY = 20_000  # frames between looks at everything


@dataclass(frozen=True)
class FleetOutcome:
    """What a rolling round cost. Seconds are virtual unless they are called CPU seconds."""

    engine_ranks: int
    replicas: int
    max_unavailable: int
    hosts_failed: int
    round_ok: bool
    round_seconds: float
    replicas_updated: int
    replicas_failed: int
    most_out_of_service: int
    """Replicas at the same time, with those whose host was down."""
    out_of_service_seconds: float
    """Of a replica that was updated, on average."""
    serving_after_seconds: float
    """From the publication until every replica serves the version, those of failed hosts too."""
    frames: int
    """Messages to and from the coordinator in the round."""
    cpu_seconds: float
    """Of the round, for coordinator and all ranks in one process."""
    all_cpu_seconds: float
    peak_bytes: int
    violations: tuple[str, ...]


class Fleet(World):
    """A world that looks at the replica whose rank moved, and rarely at everything."""

    def __init__(self, seed: int, replicas: int, max_unavailable: int | None) -> None:
        super().__init__(seed)
        self.max_unavailable, self.serving, self.fan_out = max_unavailable, False, None
        self.trainer_shape = (_TRAINERS, "rows")
        self.shape = {f"r{index}": (_HOST_RANKS, "direct") for index in range(replicas)}
        self.frames = 0
        self.slow = False
        self.down: dict[str, float] = {}
        """Since when replicas are out of service."""
        self.most_down = 0
        self.out_of_service: dict[str, float] = {}
        """How long each replica was, the last time."""
        self.versions: dict[str, int] = {}
        """What replicas in service hold."""
        self.awaited = 0
        self.all_serve = asyncio.Event()
        """Every replica is in service with version ``awaited``."""

    def replica(self, name: str) -> list[EngineProcess]:
        """Return the ranks of a replica that live."""
        ranks = (self.engines.get(f"{name}/{rank}") for rank in range(_HOST_RANKS))
        return [engine for engine in ranks if engine is not None and engine.alive]

    def at_point(self, process: Process, point: str, fast: float) -> tuple[float, str | None]:
        """As in every schedule, but reads take long."""
        seconds, kind = super().at_point(process, point, fast)
        return (self.random.uniform(*_READ_SECONDS) if self.slow and point == "begin" else seconds), kind

    def stepped(self) -> None:
        """A frame arrived."""
        self.frames += 1
        if self.frames % _LOOK_EVERY == 0:
            super().checked()

    def checked(self) -> None:
        """Look at the replica of the running rank."""
        self.steps += 1
        process = self.threads.process()
        if isinstance(process, EngineProcess):
            self.look_at(process.name)

    def look_at(self, name: str) -> None:
        """Note whether a replica is in service, and what it must not do."""
        ranks = self.replica(name)
        serves = len(ranks) == _HOST_RANKS and all(engine.generating for engine in ranks)
        if not serves:
            self.down.setdefault(name, self.loop.time())
            self.most_down = max(self.most_down, len(self.down))
            self.versions.pop(name, None)
        else:
            if name in self.down:
                self.out_of_service[name] = self.loop.time() - self.down.pop(name)
            self.versions[name] = min(-1 if engine.label is None else engine.label.number for engine in ranks)
            if self.versions[name] == self.awaited and list(self.versions.values()).count(self.awaited) == len(self.shape):
                self.all_serve.set()
        for engine in ranks:
            if engine.generating and engine.content is None:
                self.violated("torn", f"{engine} generates with a mixture of weights")
            elif engine.generating and engine.label is not None and engine.label.number != engine.content:
                self.violated("mislabelled", f"{engine} answers as {engine.label} with the bytes of {engine.content}")

    def fail_host(self, name: str) -> None:
        """All ranks of a host die at once; after a reboot they come back."""
        for engine in self.replica(name):
            self.hit("host failed", engine)
            engine.crash()
        self.look_at(name)
        self.loop.call_later(_REBOOT_SECONDS, self.boot, name)

    def boot(self, name: str) -> None:
        """Start the ranks of a host."""
        for rank in range(_HOST_RANKS):
            self.start_engine(name, rank)

    async def all_serving(self, number: int) -> None:
        """Wait until every replica is in service with version ``number``; raise if one is not, or is not routed to."""
        async with asyncio.timeout(_LONGEST):
            await self.all_serve.wait()
        await asyncio.sleep(1.0)  # the answers of the last ranks are under way
        if self.coordinator is None:
            raise RuntimeError("there is no coordinator")
        for replica in self.coordinator.coordinator.status().replicas:
            if not replica.routable or replica.version != number:
                raise RuntimeError(
                    f"{replica.name} is {replica.state} with version {replica.version}, not {number}: {replica.error}"
                )


async def _publish(world: Fleet, number: int) -> RoundResult:
    """Publish from all trainer ranks."""
    world.awaited = number
    world.all_serve.clear()
    outcomes: list[Any] = []
    done = asyncio.Event()

    def told(process: TrainerProcess, outcome: Any, seconds: float) -> None:
        outcomes.append(outcome)
        if len(outcomes) == _TRAINERS:
            done.set()

    for trainer in world.trainers.values():
        trainer.publish(number, _LONGEST, False, 0.0, told)
    async with asyncio.timeout(_LONGEST + _JOIN_SECONDS):
        await done.wait()
    result = outcomes[0]
    if not isinstance(result, RoundResult):
        raise RuntimeError(f"version {number} was not published: {result!r}; {world.violations}")
    return result


async def _fleet(seed: int, ranks: int, unavailable: float, failing: float) -> FleetOutcome:
    replicas = ranks // _HOST_RANKS
    most = max(1, round(replicas * unavailable))
    world = Fleet(seed, replicas, most)
    with replaced((coordination, "_LONGEST", _LONGEST)), installed(world):
        try:
            world.start_coordinator()
            for rank in range(_TRAINERS):
                world.start_trainer(rank)
            for name in world.shape:
                world.boot(name)
            await asyncio.sleep(_JOIN_SECONDS)
            await _publish(world, 1)
            await world.all_serving(1)
            world.slow, world.out_of_service, world.most_down = True, {}, 0
            hosts = random.Random(f"hosts {seed}").sample(list(world.shape), round(replicas * failing))
            for name in hosts:
                world.loop.call_later(world.random.uniform(0.1, _FAILING_SECONDS), world.fail_host, name)
            frames, cpu, started = world.frames, time.process_time(), world.loop.time()
            result = await _publish(world, 2)
            frames, cpu = world.frames - frames, time.process_time() - cpu
            await world.all_serving(2)
            whole = world.loop.time() - started
        finally:
            world.bury()
            await asyncio.sleep(0.01)
    updated = [one for one in result.replicas if one.error is None]
    times = [seconds for name, seconds in world.out_of_service.items() if name not in hosts]
    return FleetOutcome(
        engine_ranks=ranks, replicas=replicas, max_unavailable=most, hosts_failed=len(hosts), round_ok=result.ok,
        round_seconds=result.seconds, replicas_updated=len(updated), replicas_failed=len(result.replicas) - len(updated),
        most_out_of_service=world.most_down, out_of_service_seconds=sum(times) / max(len(times), 1), serving_after_seconds=whole,
        frames=frames, cpu_seconds=cpu, all_cpu_seconds=time.process_time(),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        violations=(*world.violations, *(repr(error) for error in world.threads.crashed)),
    )  # fmt: skip


def run_fleet(ranks: int, seed: int = 1, unavailable: float = 0.1, failing: float = 0.01) -> FleetOutcome:
    """Join, publish to everybody at once, then publish again in a rolling round while hosts fail.

    Args:
        ranks: Engine ranks, 8 on each host.
        seed: Of everything random.
        unavailable: Share of the replicas that may be out of service at the same time.
        failing: Share of the hosts that fail.
    """
    return run(_fleet(seed, ranks, unavailable, failing))
