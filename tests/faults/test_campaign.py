"""Holds that real processes killed, stopped or lied to in the middle of a round leave nothing torn, mislabelled, hanging or behind.

The whole campaign is ``make faults``; here is a part of it, and the proof that its oracles see what they are there for.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.faults import leaks, points
from tests.faults.campaign import DELTAS, FORK_MUTANT_ACTS, STORE, cases
from tests.faults.disaggregated import DISAGGREGATED, LATE, MUTANT_CASES, disaggregated_cases
from tests.faults.fork_mutants import MUTANTS
from tests.faults.leaks import Held, grown, held
from tests.faults.mutants import UPDATE_MUTANTS, planted
from tests.faults.network import obstacle
from tests.faults.source_mutants import SOURCE_MUTANTS
from tests.faults.sources import MUTANT_ACTS, SOURCE_TRANSPORTS, source_cases
from tests.faults.stage import Tally
from tests.faults.weights import MANIFEST, Weights, fill
from tests.processes import ChildProcess

import weightsync_disaggregated
import weightsync_relay
from weightsync import external, failpoints
from weightsync.engine import session_front
from weightsync.model import Version
from weightsync.protocol.lora_messages import DropLora, PrepareLora, RegisterLora, StageLora
from weightsync.protocol.messages import (
    Audit,
    CheckSources,
    Commit,
    EndStream,
    KeepLayout,
    LetGo,
    Move,
    MoveWindow,
    OpenStream,
    Pause,
    Place,
    Prepare,
    Quarantine,
    Resume,
    Revert,
    Stage,
    Update,
)
from weightsync.protocol.update_messages import JoinGroup, LeaveGroup, Receive, Verify
from weightsync.transports import registry

COUNTED = ["schedules", "faults_injected", "kills", "corruptions", "sources"]
ZEROS = ["torn_responses", "mislabelled_responses", "hangs", "leaks", "uncaught_corruptions"]
PLANTED = ["went_on_after_a_failure", "mutants", "mutants_caught"]


EVERY_POINT = {
    *points.TRAINER_POINTS,
    *points.ENGINE_POINTS,
    *points.ENGINE_ALONE_POINTS,
    *points.ENGINE_TOGETHER_POINTS,
    *points.ENGINE_REPAIR_POINTS,
    *points.COORDINATOR_POINTS,
}


def campaign(*arguments: str, seconds: float = 170) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.faults", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert run.returncode == 0, run.stderr + run.stdout
    found: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    assert list(found) == COUNTED + ZEROS + PLANTED
    assert {found[key] for key in ZEROS} == {0}
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("transport", "chosen"),
    [
        (
            "shared_memory",
            [
                "orphan/duo-1/engine.move",
                "unwind/solo-0",
                "kill/duo-1/engine.group",
                "kill/coordinator/round.moved",
                "kill/trainer-1/trainer.placing",
                "flip/trainer-1",
            ],
        ),
        pytest.param("network", ["cut/solo-0/engine.group"], marks=pytest.mark.rare),
        pytest.param("relay", ["cut/solo-0/engine.committed", "break/solo-0/engine.group"], marks=pytest.mark.rare),
        pytest.param(
            "tcp",
            ["kill/solo-0/engine.committed", "stop/duo-1/engine.move", "kill/trainer-0/trainer.placed", "swap/trainer-0"],
            marks=pytest.mark.rare,
        ),
        pytest.param(
            DELTAS,
            ["lists/trainer-0", "staged/duo-1", "kill/duo-1/engine.applied", "kill/duo-1/engine.revert", "stop/coordinator"],
            marks=pytest.mark.rare,
        ),
        pytest.param(STORE, ["kill/trainer-0/store.manifest_written", "stop/trainer-1/store.piece"], marks=pytest.mark.rare),
    ],
)
def test_a_part_of_the_campaign(transport: str, chosen: list[str]) -> None:
    reason = obstacle("cut") if transport == "network" else None
    if reason is not None:
        pytest.skip(reason)
    only = [text for part in chosen for text in ("--only", part)]
    found = campaign("--transport", transport, "--soak", "40" if transport in ("shared_memory", "tcp") else "0", *only)
    assert found["schedules"] >= len(chosen)
    assert found["went_on_after_a_failure"] == {DELTAS: 3, STORE: 1}.get(transport, 0)  # with the warm-up
    assert found["faults_injected"] > len(chosen)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_part_of_the_campaign_of_updates_from_outside() -> None:
    chosen = ["late", "kill/server/rank.load", "kill/trainer/rank.received.receive"]
    only = [text for part in chosen for text in ("--only", part)]
    found = campaign("--transport", DISAGGREGATED, "--soak", "0", *only)
    assert found["schedules"] == len([act for act in LATE if "late" in act]) + 2
    assert found["mutants"] == 0


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(180)
def test_a_bug_that_is_put_back_is_noticed() -> None:
    found = campaign("--transport", DISAGGREGATED, "--soak", "0", "--only", "mutant")
    assert (found["schedules"], found["mutants"], found["mutants_caught"]) == (0, len(UPDATE_MUTANTS), len(UPDATE_MUTANTS))


def test_every_point_of_an_update_from_outside_is_visited_and_every_mutant_has_a_case() -> None:
    visited = {(case.act, case.party, case.point) for case in disaggregated_cases()}
    assert {(act, "server", point) for act in ("kill", "stop") for point in points.UPDATE_POINTS} <= visited
    assert set(MUTANT_CASES) == set(UPDATE_MUTANTS)
    assert {act for acts in MUTANT_CASES.values() for act in acts} <= set(LATE)
    assert len({case.name for case in disaggregated_cases()}) == len(list(disaggregated_cases()))
    packages = (external, weightsync_disaggregated)
    source = "".join(path.read_text() for package in packages for path in Path(str(package.__file__)).parent.glob("*.py"))
    reached = set(re.findall(r'points\.reached\("([a-z.]+)"\)', source)) | _of_a_front("rank")
    # Commit and Resume begin with points of their own, and Describe changes nothing.
    reached |= {f"rank.received.{kind.__name__.lower()}" for kind in (JoinGroup, Pause, Receive, Verify, LeaveGroup, Quarantine)}
    assert reached == {*points.UPDATE_POINTS, "updates.abort", "rank.received.quarantine"}  # the last two only after a failure


def test_a_planted_bug_is_taken_out_again() -> None:
    right = {name: getattr(owner, attribute) for name, (owner, attribute, _) in UPDATE_MUTANTS.items()}
    for name, (owner, attribute, bug) in UPDATE_MUTANTS.items():
        with planted(name):
            assert getattr(owner, attribute) is bug
        assert getattr(owner, attribute) is right[name]


def test_every_point_is_visited_by_every_party_that_has_it() -> None:
    visited = {(case.transport, case.act, case.point) for case in cases()}
    for transport in ("shared_memory", "tcp"):
        for act in ("kill", "stop"):
            for point in EVERY_POINT:
                assert (transport, act, point) in visited
    assert {(STORE, act, point) for act in ("kill", "stop") for point in points.STORE_POINTS} <= visited
    assert {(DELTAS, act, point) for act in ("kill", "stop") for point in points.DELTA_POINTS} <= visited
    assert len({case.name for case in cases()}) == len(list(cases()))


def _of_a_front(prefix: str) -> set[str]:
    """Points that rounds and updates from outside share."""
    source = Path(session_front.__file__).read_text()
    return {f"{prefix}.{point}" for point in re.findall(r'points\.reached\(f"\{self\._points\}\.([a-z]+)"\)', source)}


def test_every_point_that_code_reaches_is_one_of_them() -> None:
    parties = ("engine", "trainer", "round", "relay", "store")
    folders = (Path(str(package.__file__)).parent for package in (failpoints, weightsync_relay))
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    named = set(re.findall(rf'points\.reached\("((?:{"|".join(parties)})\.[a-z._]+)"\)', text))
    to_engines = (
        Prepare,
        CheckSources,
        LetGo,
        Pause,
        Move,
        Commit,
        Resume,
        Update,
        Quarantine,
        OpenStream,
        MoveWindow,
        EndStream,
        Place,
        Stage,
        Revert,
        Audit,
        KeepLayout,
    )
    received = {f"engine.received.{message.__name__.lower()}" for message in to_engines}
    of_adapters = (PrepareLora, StageLora, RegisterLora, DropLora)
    received |= {f"engine.lora.received.{message.__name__.lower()}" for message in of_adapters}
    assert named | received | _of_a_front("engine") == EVERY_POINT | {
        *points.STREAM_POINTS,
        *points.SOURCE_POINTS,
        *points.GONE_POINTS,
        *points.KEYED_POINTS,
        *points.DELTA_POINTS,
        *points.AUDIT_POINTS,
        *points.MOVING_POINTS,
        *points.LORA_POINTS,
        *points.RELAY_POINTS,
        *points.STORE_POINTS,
    }


def test_points_cost_nothing_to_speak_of_and_carry_no_gate_here() -> None:
    assert failpoints._gate is None
    count = 100_000
    started = time.thread_time()
    for _ in range(count):
        failpoints.reached("anything")
    assert (time.thread_time() - started) / count < 20e-6


def labelled(weights: Weights, number: int) -> None:
    weights.pause("abort", 5.0)
    fill([shard.tensor for shard in weights.shards()], 0, number)
    weights.finish(Version("run", number, MANIFEST.fingerprint, "0" * 16))
    weights.resume()


def test_the_oracle_sees_torn_and_mislabelled_weights() -> None:
    weights, tally = Weights(0, 1), Tally()
    tally.take("r", weights.answer())
    assert tally.served == 0  # it does not serve yet
    labelled(weights, 7)
    tally.take("r", weights.answer())
    assert (tally.served, tally.torn, tally.mislabelled) == (1, 0, 0)
    tensors: list[torch.Tensor] = [shard.tensor for shard in weights.shards()]
    fill(tensors[:3], 0, 8)
    tally.take("r", weights.answer())
    assert (tally.torn, tally.mislabelled) == (1, 0)
    fill(tensors, 0, 8)
    tally.take("r", weights.answer())
    assert (tally.torn, tally.mislabelled) == (1, 1)
    labelled(weights, 9)
    tensors[5][[3, 4]] = tensors[5][[4, 3]]  # rows of the right version in the wrong places
    tally.take("r", weights.answer())
    assert (tally.torn, tally.mislabelled) == (2, 1)


def test_a_request_holds_a_round_off() -> None:
    weights = Weights(0, 1)
    labelled(weights, 1)
    stop = threading.Event()
    tally = Tally()

    def ask() -> None:
        while not stop.is_set():
            tally.take("r", weights.answer())

    asking = threading.Thread(target=ask)
    asking.start()
    for number in range(2, 60):
        labelled(weights, number)
    stop.set()
    asking.join(10)
    assert tally.served > 0
    assert (tally.torn, tally.mislabelled) == (0, 0), tally.notes


def test_growth_is_noticed() -> None:
    now = held(os.getpid())
    fewer = Held(
        now.descriptors - Counter({next(iter(now.descriptors)): 1}), 0, now.resident
    )  # a thread of an earlier test may end
    found = grown(fewer, os.getpid(), seconds=0.2)
    assert any("holds 1 more" in line for line in found)
    assert any("threads" in line for line in found)


def test_sockets_of_other_programs_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process, and of one that it started, are."""
    mine, theirs = (f"weightsync-{secrets.token_hex(16)}" for _ in range(2))
    hold = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + {theirs!r}); print(flush=True); input()"
    with (
        socket.socket(socket.AF_UNIX) as held_here,
        ChildProcess("-c", hold) as child,
    ):
        held_here.bind(f"\0{mine}")
        child.line()
        names = {f"socket @{mine}", f"socket @{theirs}"}
        assert names <= leaks.machine()
        monkeypatch.setattr(leaks, "_family", lambda root: {child.pid})  # somebody to whom this process is another program
        assert names & leaks.machine() == {f"socket @{theirs}"}
        child.write()
        child.exit_code(20)
    assert not names & leaks.machine()


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_bugs_of_forked_children_and_of_sources_are_noticed() -> None:
    found = campaign("--transport", "shared_memory", "--soak", "0", "--only", "mutant")
    count = len(MUTANTS) + len(SOURCE_MUTANTS)
    assert (found["schedules"], found["mutants"], found["mutants_caught"]) == (0, count, count)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", SOURCE_TRANSPORTS)
def test_a_part_of_the_campaign_of_sources(transport: str) -> None:
    if reason := registry.transport(transport).unavailable():
        pytest.skip(reason)
    only = [text for act in ("flip", "kill", "taken") for text in ("--only", f"/source {act}")]
    found = campaign("--transport", transport, "--soak", "0", *only, seconds=280)
    assert found["sources"] == found["schedules"] >= 4


def test_every_point_of_a_source_is_visited_and_every_bug_of_reading_from_one_has_a_case() -> None:
    visited = {(case.act, case.point) for case in source_cases(("shared_memory",))}
    assert {(f"source {act}", point) for act in ("kill", "stop") for point in points.SOURCE_POINTS} <= visited
    for transport in SOURCE_TRANSPORTS:
        acts = {case.act for case in source_cases((transport,))}
        assert {f"source {act}" for act in ("kill", "stop", "taken", "quarantined", "updated", "flip")} <= acts
    assert set(MUTANT_ACTS) == set(SOURCE_MUTANTS)
    assert set(MUTANT_ACTS.values()) <= {act for act, _ in visited}
    names = [case.name for case in source_cases()]
    assert len(set(names)) == len(names)


def test_every_bug_of_forked_children_has_a_case() -> None:
    assert set(FORK_MUTANT_ACTS) == set(MUTANTS)
    acts = {case.act for case in cases(("shared_memory",)) if case.party.startswith("trainer")}
    assert set(FORK_MUTANT_ACTS.values()) <= acts
