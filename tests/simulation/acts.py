"""What happens at a moment of virtual time: crashes, cut wires, clocks that jump."""

from __future__ import annotations

from tests.simulation.faults import Fault
from tests.simulation.ranks import Agent, EngineProcess
from tests.simulation.world import World

from weightsync.errors import WeightSyncError

__all__ = ["happen"]


def happen(world: World, fault: Fault) -> None:
    """Let ``fault`` happen now."""
    if world.calm:
        return
    agent: Agent | None = world.engines.get(fault.member) or world.trainers.get(fault.member) or world.publishers.get(fault.member)
    if fault.name.startswith("coordinator"):
        _coordinator(world, fault)
    elif fault.name == "clock of the machine jumps":
        _jump(world, fault)
    elif fault.name == "wall clock jumps back":
        world.hit(fault.name)
        world.wall_offset -= 86400.0
    elif fault.name == "duplicated frames":
        world.duplicating = True
    elif fault.name == "seeding asked for":
        _seed(world, fault)
    elif fault.name == "replica joins":
        _join(world, fault)
    elif agent is not None and agent.alive:
        _to_agent(world, fault, agent)


def _coordinator(world: World, fault: Fault) -> None:
    coordinator = world.coordinator
    if coordinator is None:
        return
    world.hit(fault.name, coordinator)
    if fault.name == "coordinator crash":
        world.crash(coordinator)
    else:
        coordinator.shut_down()
        world.restart_later(coordinator)


def _jump(world: World, fault: Fault) -> None:
    """The machine was suspended: all clocks go on where they are now."""
    seconds = fault.seconds if fault.seconds < 10 else 60.0
    world.hit(fault.name)
    world.jumped += seconds
    world.loop.jump(seconds)
    for process in world.processes():
        world.trouble(process, 0.0)


def _seed(world: World, fault: Fault) -> None:
    if world.coordinator is None:
        return
    world.hit(fault.name)
    coordinator = world.coordinator

    async def seed() -> None:
        try:
            await coordinator.coordinator.seed(timeout=fault.seconds)
        except WeightSyncError as error:
            world.seen[f"seed raised {type(error).__name__}"] += 1

    coordinator.spawn(seed())


def _join(world: World, fault: Fault) -> None:
    """A replica that nobody knew."""
    if len(world.shape) >= 4:
        return
    world.hit(fault.name)
    name = f"r{len(world.shape)}"
    world.shape[name] = (1, world.random.choice(("receiver" if world.streams else "direct", "whole", "opaque")))
    world.start_engine(name, 0)


def _to_agent(world: World, fault: Fault, agent: Agent) -> None:
    now, wires = world.loop.time(), [wire for wire in agent.wires if not wire.cut]
    match fault.name:
        case "engine crash" | "trainer crash" | "relay crash":
            world.hit(fault.name, agent)
            world.crash(agent)
        case "connection reset" if wires:
            world.hit(fault.name, agent)
            wires[-1].lose(0.0, 0.0)
        case "connection lost without a word" if wires:
            world.hit(fault.name, agent, 20.0)
            wires[-1].lose(world.random.uniform(0.0, 20.0), world.random.uniform(0.0, 20.0))
        case "partition" if wires:
            world.hit(fault.name, agent, fault.seconds)
            agent.unreachable_until = now + fault.seconds
            if fault.seconds > 10.0:
                wires[-1].lose(world.random.uniform(10.0, 20.0), world.random.uniform(10.0, 20.0))
            else:
                wires[-1].silent_until = now + fault.seconds
        case "slow wire" if wires:
            world.hit(fault.name, agent, 2 * fault.seconds)
            wires[-1].slow_until = now + fault.seconds
        case "stall":
            world.hit(fault.name, agent, fault.seconds)
            agent.stalled_until = now + fault.seconds
        case "clock of a process jumps":
            world.hit(fault.name, agent, 60.0)
            agent.clock_offset += fault.seconds * 4
        case "second process of a rank" if isinstance(agent, EngineProcess):
            world.hit(fault.name, agent, 5.0)
            world.impostor(agent)
        case _:
            pass
