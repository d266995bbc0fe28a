"""The families of schedules. A seed says which one it belongs to."""

from __future__ import annotations

import traceback

from tests.simulation.clock import run
from tests.simulation.lora_schedule import LoraSchedule, with_adapters
from tests.simulation.people import PeopleWorld
from tests.simulation.people_schedule import PeopleSchedule
from tests.simulation.relay_schedule import RelaySchedule, with_relays
from tests.simulation.relays import RelayWorld, with_relay
from tests.simulation.schedule import Outcome, Schedule, play
from tests.simulation.store_schedule import StoreSchedule
from tests.simulation.store_world import StoreWorld, with_store
from tests.simulation.threads import forget
from tests.simulation.world import World

__all__ = ["PEOPLE", "STORES", "STREAMS", "last_of", "run_schedule"]

STREAMS = 1_000_000
"""Schedules from this seed on publish streams."""
PEOPLE = 2_000_000
"""In schedules from this seed on, programs do what people let them do, and somebody may want harm."""
STORES = 10_000_000
"""In schedules from this seed on there is a store, and the trainer may be away."""


def last_of(first: int) -> float:
    """The last seed of the family of schedules whose seeds begin at ``first``; the last family has no end."""
    return min((begin - 1 for begin in (STREAMS, PEOPLE, STORES) if begin > first), default=float("inf"))


async def _run(seed: int) -> Outcome:
    if seed >= STORES and with_relays(seed):
        regions = RelayWorld(seed)
        with with_store(regions), with_relay(regions):
            return await play(regions, RelaySchedule(regions, seed), seed)
    if seed >= STORES:
        stored = StoreWorld(seed)
        with with_store(stored):
            return await play(stored, StoreSchedule(stored, seed), seed)
    if seed >= PEOPLE:
        people = PeopleWorld(seed)
        return await play(people, PeopleSchedule(people, seed), seed)
    if seed < STREAMS and with_adapters(seed):
        world = World(seed, adapters=True)
        return await play(world, LoraSchedule(world, seed), seed)
    world = World(seed, streams=seed >= STREAMS)
    return await play(world, Schedule(world, seed), seed)


def run_schedule(seed: int) -> Outcome:
    """Run the schedule of ``seed``, in virtual time. An error that nobody expected is a violation, too."""
    try:
        return run(_run(seed))
    except RuntimeError as error:
        return Outcome(schedules=1, hangs=1, failed=[(seed, [f"hang: {error!r}"])])
    except Exception as error:  # noqa: BLE001 - an error of the schedule itself: without its seed nobody could repeat it
        return Outcome(schedules=1, failed=[(seed, [f"crash: {''.join(traceback.format_exception(error)[-4:])}"])])
    finally:
        forget()
