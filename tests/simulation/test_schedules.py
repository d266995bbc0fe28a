"""Holds that a few hundred random schedules with faults at every step keep the design's invariants, and can be repeated.

The whole campaign is ``make simulate``. A schedule that fails here is repeated by the command that the failure prints.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import weakref

import pytest
from tests.faults.points import LORA_POINTS
from tests.simulation import families
from tests.simulation.families import PEOPLE, STORES, STREAMS
from tests.simulation.faults import ALL_FAULTS, ALL_STATES, STREAM_FAULTS
from tests.simulation.lora_schedule import LORA_STATES, with_adapters
from tests.simulation.main import _outcomes, census, main, run_all, run_many
from tests.simulation.relays import RELAY_STATES
from tests.simulation.schedule import Outcome
from tests.simulation.store_world import STORE_STATES
from tests.simulation.world import World

SCHEDULES = 200
STREAM_SCHEDULES = 60
LORA_SCHEDULES = 50
PEOPLE_SCHEDULES = 40
STORE_SCHEDULES = 60
STORE_RARE = 8
RARE = 35
"""How many of all names a few hundred schedules may miss."""


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_all(range(SCHEDULES), 2)


@pytest.mark.timeout(180)
def test_no_invariant_is_violated(outcome: Outcome) -> None:
    check(outcome)
    assert outcome.schedules == SCHEDULES


@pytest.mark.timeout(180)
def test_no_invariant_is_violated_by_streams() -> None:
    outcome = run_all(range(STREAMS, STREAMS + STREAM_SCHEDULES), 2)
    check(outcome)
    assert len(census(outcome, streams=True)) <= len(STREAM_FAULTS) / 2
    assert all(
        outcome.seen[name]
        for name in ("stream received", "verified installed", "verified received", "replica failed alone", "window read again")
    )


@pytest.mark.timeout(180)
def test_no_invariant_is_violated_by_adapters_and_every_point_of_them_is_visited() -> None:
    outcome = run_many(itertools.islice(filter(with_adapters, itertools.count(SCHEDULES)), LORA_SCHEDULES))
    check(outcome)
    assert not [point for point in LORA_POINTS if not outcome.seen[point]]
    assert not [name for name in LORA_STATES if not outcome.seen[name]]


@pytest.mark.timeout(180)
def test_no_invariant_is_violated_by_people_or_thieves() -> None:
    outcome = run_all(range(PEOPLE, PEOPLE + PEOPLE_SCHEDULES), 2)
    check(outcome)
    assert len(census(outcome, people=True)) <= RARE
    assert outcome.seen["module in use"]


@pytest.mark.timeout(180)
def test_no_invariant_is_violated_by_replicas_that_join_from_a_store() -> None:
    outcome = run_all(range(STORES, STORES + STORE_SCHEDULES), 2)
    check(outcome)
    assert len(census(outcome, stores=True)) <= STORE_RARE
    assert not [name for name in (*STORE_STATES, *RELAY_STATES) if not outcome.seen[name]]


def test_a_schedule_that_is_over_leaves_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[weakref.ref[World]] = []

    class Seen(World):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            worlds.append(weakref.ref(self))

    monkeypatch.setattr(families, "World", lambda seed, **options: Seen(seed))
    left = [sum(world() is not None for world in worlds) for _ in _outcomes(range(4))]
    assert left == [1, 1, 1, 1], "all but the last one, whose garbage is collected before the next one begins"


def check(outcome: Outcome) -> None:
    lines = [
        f"python -m tests.simulation --seed {seed}\n  " + "\n  ".join(line.rstrip() for line in found[:5])
        for seed, found in outcome.failed
    ]
    assert not lines, "\n".join(lines)


def test_most_of_what_can_happen_did(outcome: Outcome) -> None:
    missing = census(outcome)
    assert len(missing) <= RARE, missing
    assert not [
        name for name in missing if name in ALL_STATES and name.startswith(("replica", "phase", "verified", "delivery", "fed by"))
    ]
    assert outcome.kills > SCHEDULES / 4
    assert outcome.corruptions > SCHEDULES / 10
    assert len(set(ALL_FAULTS)) == len(ALL_FAULTS)


def test_a_seed_means_one_schedule() -> None:
    first, second = (run_many(range(7, 12)) for _ in range(2))
    assert (first.steps, first.seen, first.injected) == (second.steps, second.seen, second.injected)
    assert first.steps


@pytest.mark.timeout(180)
def test_the_program_ends_with_one_line_for_programs() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "4", "--no-mutants", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert list(summary) == [
        "schedules", "faults_injected", "kills", "corruptions", "torn_responses", "mislabelled_responses", "hangs", "leaks",
        "uncaught_corruptions", "mutants", "mutants_caught",
    ]  # fmt: skip
    assert summary["schedules"] == 4
    assert not any(summary[name] for name in ("torn_responses", "mislabelled_responses", "hangs", "leaks", "uncaught_corruptions"))


def test_one_seed_is_repeated_and_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.main._prepare", lambda core: None)
    with pytest.raises(SystemExit) as ended:
        main(["--seed", "3"])
    assert ended.value.code == 0
    assert "schedule 3: ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--streams", "--first", "1600000"],
        ["--seeds", "11", "--first", "999990"],
        ["--people", "--first", "8000000"],
        ["--stores", "--first", "-1"],
    ],
)
def test_seeds_that_are_not_of_the_family_that_was_asked_for_are_an_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "are not all of this family" in capsys.readouterr().err


def test_an_error_of_a_schedule_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seed: int) -> World:
        raise IndexError("nobody is left")

    monkeypatch.setattr(families, "PeopleWorld", fail)
    outcome = run_many([PEOPLE])
    seeds = [seed for seed, _ in outcome.failed]
    assert (seeds, outcome.hangs) == ([PEOPLE], 0)
    assert "nobody is left" in outcome.failed[0][1][0]
