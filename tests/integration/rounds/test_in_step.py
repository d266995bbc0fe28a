"""A replica of two ranks that compute in step is updated between two of its forward passes, never in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.integration.rounds.in_step_ranks import fill, model

from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]
LAST = 12
pytestmark = pytest.mark.timeout(180)  # two ranks import torch, on two cores that others use too


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


def ranks(server: BackgroundServer, folder: Path, kind: str, owned: ExitStack) -> list[subprocess.Popen[str]]:
    """Two ranks, and the end of each."""
    started = []
    for rank in range(2):
        arguments = [str(rank), str(folder / "store"), server.url, kind, str(LAST)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rounds.in_step_ranks", *arguments],
            cwd=ROOT,
            env={**os.environ, "WEIGHTSYNC_TOKEN": server.token, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        owned.callback(process.wait, 30)
        owned.callback(process.communicate, "\n", 30)
        started.append(process)
    return started


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("replicated", marks=pytest.mark.rare)])
def test_ranks_enter_together_and_no_pass_mixes_two_versions(server: BackgroundServer, tmp_path: Path, kind: str) -> None:
    policy = model()
    with ExitStack() as owned:
        trainer = owned.enter_context(Trainer(policy, server.url, token=server.token))
        processes = ranks(server, tmp_path, kind, owned)
        trainer.wait_for_replicas(1, timeout=90)
        for number in range(1, LAST + 1):
            fill(policy, number)
            (replica,) = trainer.publish(number, timeout=40).replicas
            assert (replica.version, replica.delivery, replica.verified) == (number, "direct", "installed")
        for said in map(report, processes):
            assert said["passes"]
            assert (said["wrong"], said["error"]) == ([], "")


def voting(folder: Path, kind: str, owned: ExitStack) -> list[subprocess.Popen[str]]:
    processes = []
    for rank in range(2):
        command = [sys.executable, "-m", "tests.integration.rounds.vote_ranks", str(rank), str(folder / "store"), kind]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        owned.enter_context(process)
        owned.callback(process.kill)
        processes.append(process)
    return processes


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.rare
def test_a_vote_that_ran_into_its_timeout_is_waited_for_by_the_next_call(tmp_path: Path) -> None:
    """Until its result is known a pause waits, because the other rank may have it, and be inside."""
    with ExitStack() as owned:
        processes = first, second = voting(tmp_path, "vote", owned)
        assert line(first) == "late"
        tell(second)
        said = report(first)
        assert "waiting for the other ranks of this replica (2 in all) to call in_use() took more than 2 s" in said["outcome"]
        assert (said["paused"], said["users"]) == (False, 0)
        assert report(second)["users"] == 0
        assert [process.wait(30) for process in processes] == [0, 0]


@pytest.mark.rare
def test_a_rank_that_gave_up_waiting_does_not_keep_the_other_from_its_pause(tmp_path: Path) -> None:
    """It had said that it was there, and the other one held its vote for it: no update could pause that rank."""
    with ExitStack() as owned:
        processes = first, second = voting(tmp_path, "meet", owned)
        assert line(first) == "gave up"
        tell(second)
        assert line(second) == "paused"
        tell(first)
        assert [process.wait(30) for process in processes] == [0, 0]
