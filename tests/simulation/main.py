"""``python -m tests.simulation``: many schedules on several processes, a census of what occurred, mutants, one JSON line."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from tests.faults.points import RELAY_POINTS, STORE_POINTS
from tests.simulation.families import PEOPLE, STORES, STREAMS, last_of, run_schedule
from tests.simulation.faults import ALL_FAULTS, ALL_STATES, STREAM_FAULTS
from tests.simulation.fleet import run_fleet
from tests.simulation.lora_schedule import LORA_FAULTS, LORA_STATES, with_adapters
from tests.simulation.mutants import MUTANTS
from tests.simulation.mutants_loras import LORA_MUTANTS
from tests.simulation.mutants_people import PEOPLE_MUTANTS
from tests.simulation.mutants_relay import RELAY_MUTANTS
from tests.simulation.mutants_store import STORE_MUTANTS
from tests.simulation.mutants_stream import STREAM_MUTANTS
from tests.simulation.object_store import STORE_FAULTS
from tests.simulation.people_schedule import PEOPLE_ACTIONS, PEOPLE_STATES
from tests.simulation.relay_schedule import RELAY_FAULTS, with_relays
from tests.simulation.relays import RELAY_STATES
from tests.simulation.schedule import Outcome
from tests.simulation.store_world import STORE_STATES

__all__ = ["census", "hunt", "main", "run_all", "run_many"]

_CHUNK = 10
_SHOWN = 5
_ENOUGH_FOR_ALL = 2000
"""Schedules from which on everything that can occur must have occurred."""
_REAL_SECONDS = 120.0
"""Of a schedule that takes some hundredths of one; after them, something in it really waits."""
_REARM_SECONDS = 10.0
"""Seconds after which the watch over such waits is set again. Setting it starts a thread: a fiftieth of a schedule's time."""
_MOST_SEEDS = 1500
"""Schedules in which a mutant must be caught."""


def _begin(counter: Any) -> None:
    """A process of the pool: takes the next core, and ends with its parent, however that ends."""
    with counter.get_lock():
        core, counter.value = counter.value, counter.value + 1
    _prepare(core)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="end with the parent", daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _pool(processes: int) -> ProcessPoolExecutor:
    context = get_context("forkserver")  # what is imported is imported once, and its pages are shared
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(context.Value("i", 0),))


def _prepare(core: int) -> None:
    """Be quiet, and stay on one core."""
    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays: without this, looking at it over and over takes a fifth of the time
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def _outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Run schedules, one after the other. All threads of one are one: a real wait would never end, so it ends the process."""
    armed, collecting = -_REARM_SECONDS, gc.isenabled()
    gc.disable()
    try:
        for seed in seeds:
            gc.collect(1)  # of the schedule before, not in the middle of one
            if time.monotonic() - armed >= _REARM_SECONDS:
                faulthandler.dump_traceback_later(_REAL_SECONDS, exit=True, file=2)
                armed = time.monotonic()
            yield run_schedule(seed)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if collecting:
            gc.enable()


def run_many(seeds: Iterable[int]) -> Outcome:
    """The schedules of ``seeds``, one after the other."""
    total = Outcome()
    for outcome in _outcomes(seeds):
        total.add(outcome)
    return total


def hunt(name: str, first: int = 0, most: int = _MOST_SEEDS) -> tuple[str, int | None, str]:
    """Run schedules with a mutant until one notices it: its name, the number of schedules (``None``: not noticed), by what."""
    first += STREAMS if name in STREAM_MUTANTS else PEOPLE if name in PEOPLE_MUTANTS else STORES if name in STORE_MUTANTS else 0
    seeds: Iterable[int] = range(first, first + most)
    if name in LORA_MUTANTS:
        seeds = itertools.islice(filter(with_adapters, itertools.count(first)), most)
    if name in RELAY_MUTANTS:
        seeds = itertools.islice(filter(with_relays, itertools.count(first)), most)
    with MUTANTS[name]():
        for count, outcome in enumerate(_outcomes(seeds), 1):
            if outcome.failed:
                return name, count, outcome.failed[0][1][0]
    return name, None, ""


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def census(total: Outcome, *, streams: bool = False, people: bool = False, stores: bool = False) -> list[str]:
    """What should have occurred and did not."""
    if stores:
        struck = {name.rpartition(" in ")[2] for name in total.injected}
        missing = [name for name in (*STORE_FAULTS, *RELAY_FAULTS) if not total.injected[name]]
        missing += [name for name in (*STORE_POINTS, *RELAY_POINTS) if name not in struck]
        return missing + [name for name in (*STORE_STATES, *RELAY_STATES) if not total.seen[name]]
    if streams:
        return [name for name in STREAM_FAULTS if not total.injected[name]]
    if people:
        missing = [name for name in PEOPLE_ACTIONS if not total.injected[name]]
        return missing + [name for name in PEOPLE_STATES if not total.seen[name]]
    struck = {name.rpartition(" in ")[2] for name in total.injected}
    missing = [name for name in ALL_FAULTS if not total.injected[name]] + [name for name in LORA_FAULTS if name not in struck]
    return missing + [name for name in (*ALL_STATES, *LORA_STATES) if not total.seen[name]]


def _print_census(total: Outcome) -> None:
    for title, known, counted in (("faults", ALL_FAULTS, total.injected), ("states", ALL_STATES, total.seen)):
        print(f"{title}:")
        for name in (*known, *sorted(counted.keys() - set(known))):
            print(f"  {counted[name]:>8,}  {name}")


def run_all(seeds: range, processes: int) -> Outcome:
    """The schedules of ``seeds`` on several processes."""
    total = Outcome()
    with _pool(processes) as pool:
        for outcome in pool.map(run_many, _chunks(seeds)):
            total.add(outcome)
    return total


def _chunks(seeds: range) -> Iterator[range]:
    for first in range(seeds.start, seeds.stop, _CHUNK):
        yield range(first, min(first + _CHUNK, seeds.stop))


def _report(failed: list[tuple[int, list[str]]]) -> None:
    for seed, lines in sorted(failed)[:_SHOWN]:
        print(f"\nschedule {seed} failed; reproduce it with: python -m tests.simulation --seed {seed}")
        for line in lines[:_SHOWN]:
            print(f"  {line.rstrip()}")
    if len(failed) > _SHOWN:
        print(f"\n... and {len(failed) - _SHOWN} more")


def _one(seed: int) -> int:
    _prepare(0)
    outcome = run_many([seed])
    for _, lines in outcome.failed:
        print("\n".join(line.rstrip() for line in lines))
    print(
        f"schedule {seed}: {'FAILED' if outcome.failed else 'ok'}, {outcome.steps} steps, {sum(outcome.injected.values())} faults"
    )
    return 1 if outcome.failed else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, print, exit with 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="schedules to run (default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="seed of the first schedule, from its family's first one (default: 0)"
    )
    parser.add_argument("--seed", type=int, metavar="SEED", help="run this one schedule and print all that happened in it")
    parser.add_argument(
        "--processes", type=int, default=cores(), metavar="N", help="processes (default: one for each core, %(default)s)"
    )
    family = parser.add_mutually_exclusive_group()
    family.add_argument("--streams", action="store_true", help=f"schedules of streams: their seeds begin at {STREAMS:,}")
    family.add_argument("--people", action="store_true", help=f"schedules of people and thieves: their seeds begin at {PEOPLE:,}")
    family.add_argument("--stores", action="store_true", help=f"schedules with a store: their seeds begin at {STORES:,}")
    parser.add_argument("--no-mutants", action="store_true", help="do not plant bugs afterwards")
    parser.add_argument("--fleet", type=int, metavar="RANKS", help="one rolling round of so many engine ranks instead")
    parser.add_argument("--failing", type=float, default=0.01, metavar="SHARE", help="of the fleet's hosts (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.fleet is not None:
        sys.exit(_fleet(given.fleet, given.failing))
    if given.seed is not None:
        sys.exit(_one(given.seed))
    begin = STREAMS if given.streams else PEOPLE if given.people else STORES if given.stores else 0
    seeds = range(begin + given.first, begin + given.first + given.seeds)
    if given.first < 0 or seeds.stop - 1 > last_of(begin):
        parser.error(
            f"--first {given.first} counts from the family's first seed, {begin}: {given.seeds} schedules from {seeds.start} on "
            f"are not all of this family, whose last seed is {last_of(begin)}"
        )
    sys.exit(_campaign(seeds, given.processes, not given.no_mutants))


def _fleet(ranks: int, failing: float) -> int:
    _prepare(0)
    outcome = run_fleet(ranks, failing=failing)
    print(json.dumps(asdict(outcome)))
    return 0 if outcome.round_ok and not outcome.violations else 1


def _campaign(seeds: range, processes: int, mutants: bool) -> int:
    stores = seeds.start >= STORES
    people = seeds.start >= PEOPLE and not stores
    streams = STREAMS <= seeds.start < PEOPLE
    started = time.monotonic()
    total = run_all(seeds, processes)
    seconds = time.monotonic() - started
    caught: list[tuple[str, int | None, str]] = []
    if mutants:
        with _pool(processes) as pool:
            others = MUTANTS.keys() - STREAM_MUTANTS.keys() - PEOPLE_MUTANTS.keys() - STORE_MUTANTS.keys()
            planted = STREAM_MUTANTS if streams else PEOPLE_MUTANTS if people else STORE_MUTANTS if stores else others
            caught = list(pool.map(hunt, planted))
    _print_census(total)
    if caught:
        print("mutants:")
        for name, count, what in caught:
            print(f"  {name}: " + (f"caught by schedule {count}: {what[:90]}" if count else "NOT CAUGHT"))
    missing = census(total, streams=streams, people=people, stores=stores) if len(seeds) >= _ENOUGH_FOR_ALL else []
    for name in missing:
        print(f"never occurred: {name}")
    _report(total.failed)
    print(f"\n{total.schedules:,} schedules in {seconds:.0f} s: {total.schedules / max(seconds, 1e-9):.1f} a second")
    summary = {
        "schedules": total.schedules,
        "faults_injected": sum(total.injected.values()),
        "kills": total.kills,
        "corruptions": total.corruptions,
        "torn_responses": total.torn,
        "mislabelled_responses": total.mislabelled,
        "hangs": total.hangs,
        "leaks": total.leaks,
        "uncaught_corruptions": total.uncaught,
        "mutants": len(caught),
        "mutants_caught": sum(count is not None for _, count, _ in caught),
    }
    print(json.dumps(summary))
    return 1 if total.failed or missing or any(count is None for _, count, _ in caught) else 0
