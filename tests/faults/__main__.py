"""``python -m tests.faults``: the whole campaign, or a part of it.

Ends with one JSON line; the exit status is 0 only if all is as it must be.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from tempfile import TemporaryDirectory

from tests.faults.campaign import (
    CHANGED_ONE_OF,
    DELTAS,
    FORK_MUTANT_ACTS,
    STORE,
    TRANSPORTS,
    Case,
    Findings,
    cases,
    fork_mutant_is_caught,
    run_cases,
)
from tests.faults.disaggregated import DISAGGREGATED, MUTANT_CASES, caught, disaggregated_cases, run_disaggregated
from tests.faults.leaks import machine
from tests.faults.network import Network, obstacle
from tests.faults.relay import Relay
from tests.faults.soak import soak
from tests.faults.sources import MUTANT_ACTS, SOURCE_TRANSPORTS, run_sources, source_cases, source_mutant_is_caught
from tests.faults.stage import Stage, Tally

from weightsync.errors import WeightSyncError

__all__ = ["main"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cases whose name contains this; repeatable"
    )
    parser.add_argument("--transport", choices=(*TRANSPORTS, DISAGGREGATED), action="append", help="only over this; repeatable")
    parser.add_argument("--soak", type=int, default=1000, metavar="ROUNDS", help="rounds of the soak, 0 for none (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the soak's joins and leaves (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    given = parser.parse_args(arguments)
    asked = tuple(given.transport or (*TRANSPORTS, DISAGGREGATED))
    transports = tuple(one for one in asked if one != DISAGGREGATED)

    def wanted(name: str) -> bool:
        return not given.only or any(text in name for text in given.only)

    chosen = [case for case in cases(transports) if wanted(case.name)]
    fed = [case for case in source_cases(tuple(one for one in transports if one in SOURCE_TRANSPORTS)) if wanted(case.name)]
    pushed = [case for case in disaggregated_cases() if DISAGGREGATED in asked and wanted(case.name)]
    mutants: dict[str, Callable[[str, Callable[[str], None]], bool]] = {}
    if DISAGGREGATED in asked:
        mutants |= dict.fromkeys(MUTANT_CASES, caught)
    if "shared_memory" in asked:
        mutants |= dict.fromkeys(FORK_MUTANT_ACTS, fork_mutant_is_caught) | dict.fromkeys(MUTANT_ACTS, source_mutant_is_caught)
    mutants = {name: check for name, check in mutants.items() if wanted(f"mutant/{name}")}
    if given.list:
        print("\n".join([*(case.name for case in (*chosen, *fed, *pushed)), *(f"mutant/{name}" for name in mutants)]))
        return 0
    os.environ.setdefault("RES_OPTIONS", "attempts:0")  # as in tests/conftest.py
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # in the parties, whose lost connections are what this is about
    found, started, before = Findings(), time.monotonic(), machine()
    tally, injected = Tally(), Counter[str]()
    made: dict[str, Callable[[], AbstractContextManager[Network | Relay]]] = {"network": Network.made, "relay": Relay.made}
    for transport in transports:
        mine = [case for case in chosen if case.transport == transport and _possible(case)]
        rounds = given.soak if transport == transports[0] else 0
        if not mine and not rounds:
            continue
        with ExitStack() as owned:
            network = owned.enter_context(made[transport]()) if transport in made else None
            by, every = ("shared_memory", CHANGED_ONE_OF) if transport in (DELTAS, STORE) else ("tcp" if network else transport, 1)
            store = owned.enter_context(TemporaryDirectory()) if transport == STORE else None
            stage = owned.enter_context(Stage(by, tally, network, every=every, store=store))
            try:
                run_cases(stage, mine, found, _say)
                if rounds:
                    soak(stage, rounds, given.seed, found, _say)
            except WeightSyncError as error:
                found.failed.append(f"{transport}: {type(error).__name__}: {error}")
        injected += stage.injected
        found.run += len(mine)
        found.leaks += [f"{transport}: {name} did not end when asked to" for name in stage.unclean]
    for transport in transports:
        mine = [case for case in fed if case.transport == transport]
        if mine:
            injected += run_sources(transport, mine, tally, found, _say)
            found.run += len(mine)
    if pushed:
        injected += run_disaggregated(pushed, tally, found, _say)
        found.run += len(pushed)
    noticed = sum(check(name, _say) for name, check in mutants.items())
    if noticed < len(mutants):
        found.failed.append(f"{len(mutants) - noticed} of {len(mutants)} mutants were not noticed")
    found.leaks += [f"left behind: {what}" for what in sorted(machine() - before)]
    return _report(found, tally, injected, len(fed), (len(mutants), noticed), time.monotonic() - started)


@functools.cache
def _obstacle(act: str) -> str | None:
    reason = obstacle(act)
    if reason is not None:
        _say(f"skipped, {act}: {reason}")
    return reason


def _possible(case: Case) -> bool:
    return case.transport != "network" or _obstacle(case.act) is None


def _report(found: Findings, tally: Tally, injected: Counter[str], sources: int, mutants: tuple[int, int], seconds: float) -> int:
    if found.run and not tally.served:
        found.failed.append("no request was answered")
    if injected.total() < found.run:
        found.failed.append(f"{found.run} cases, but only {injected.total()} faults")
    kinds = {
        "wrong answer": tally.notes,
        "hang": found.hangs,
        "leak": found.leaks,
        "uncaught": found.uncaught,
        "failed": found.failed,
    }
    for what, lines in kinds.items():
        for line in lines[:20]:
            _say(f"{what}: {line}")
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(injected.items()))
    _say(f"{found.run} cases ({counts}), {tally.served:,} requests answered, {seconds:.0f} s")
    summary = {
        "schedules": found.run,
        "faults_injected": injected.total(),
        "kills": injected["kill"],
        "corruptions": injected["corruption"],
        "sources": sources,
        "torn_responses": tally.torn,
        "mislabelled_responses": tally.mislabelled,
        "hangs": len(found.hangs),
        "leaks": len(found.leaks),
        "uncaught_corruptions": len(found.uncaught),
        "went_on_after_a_failure": found.went_on,
        "mutants": mutants[0],
        "mutants_caught": mutants[1],
    }
    print(json.dumps(summary))
    return 1 if any(kinds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
